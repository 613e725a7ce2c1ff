"""Data-dependent regions: operators on data-dependent sizes, together one operator of the graph.

`hidden[mask]` has as many rows as the mask has ones. A trace follows that with a symbol for the
number, but a graph that is cut, sent and planned has sizes that are known. So all operators on such
tensors are one node, from the selection to where sizes are known again: the last row of each
sample, the mean, the loss. When a segment runs, these operators run as they were traced.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.types import py_sym_types
from torch.utils._pytree import tree_leaves

from merak.core.errors import TrainingError
from merak.core.storages import storage_of
from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.mutation import mutated_arguments
from merak.graph.ir.operators import DENSE_GEMMS, aten_family
from merak.graph.ir.reachable import reachable
from merak.graph.ir.serialize import may_call, pack, unpack
from merak.graph.trace.explain import refuse_dynamic_shape
from merak.graph.trace.opaque.operator import OPAQUE_CALL, CallCost, fake_call, is_dynamic_region
from merak.graph.trace.opaque.out_of_place import write_out_of_place


@dataclass(frozen=True, slots=True)
class DynamicRegion:
    """The operators of a data-dependent region.

    Args:
        nodes: their graph, as `merak.graph.ir.serialize` has it; its placeholders are the node's
            tensors.
        outputs: sizes of the tensors that it returns.
        line: the first one's line in the model's code.
    """

    nodes: tuple[Any, ...]
    outputs: tuple[tuple[int, ...], ...]
    line: str


class DynamicSizes(Enum):
    """Policy for data-dependent sizes, where no module around them is opaque.

    REFUSED: they are refused. REGIONS: operators on them become data-dependent regions.
    NON_EMPTY: they do so too, and the trace assumes that no such size is zero where the model asks.
    """

    REFUSED = "refused"
    REGIONS = "regions"
    NON_EMPTY = "non-empty"


class AssumeNonEmpty(TorchFunctionMode):
    """Function mode in which a trace assumes that no data-dependent size is zero."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Assume of every data-dependent size of a result that it is not zero."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            sizes: Sequence[Any] = leaf.shape if isinstance(leaf, FakeTensor) else ()
            for size in sizes:
                if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                    torch._check(size >= 1)
        return result


def dynamic_region_function(region: DynamicRegion) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The function that runs a data-dependent region in generated code."""
    forward = fx.GraphModule(torch.nn.Module(), unpack(region.nodes)).forward

    def dynamic_region(
        written: list[torch.Tensor], tensors: list[torch.Tensor], cost: str
    ) -> tuple[torch.Tensor, ...]:
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return tuple(fake_call(written, tensors, cost))
        # What it draws may follow the memory format, which differs by layout.
        made: tuple[torch.Tensor, ...] = forward(*(t.contiguous() for t in tensors))
        if tuple(tuple(one.shape) for one in made) != region.outputs:
            raise TrainingError(
                f"what is computed at {region.line} from elements selected by a mask has other "
                "sizes for the values of this batch than when the model was traced; let its sizes "
                "not depend on values."
            )
        return made

    return dynamic_region


@may_call
def _check(holds: bool, line: str) -> None:
    """Check an assumption about a data-dependent size, made by the model or by torch.

    Raises:
        TrainingError: it does not hold.
    """
    if not holds:
        raise TrainingError(
            f"the number of elements selected at {line} does not fit these values of the batch: "
            "the model refuses them, or takes another branch than the one that was traced; leave "
            "such batches out, or let the model use torch.where."
        )


def gather_dynamic_regions(graph: fx.Graph, line_of: Callable[[fx.Node], str]) -> None:
    """Replace operators on data-dependent sizes by data-dependent regions.

    Args:
        graph: as exported, without assertions other than on such sizes; changed in place.
        line_of: the line of the model's code that a node comes from.

    Raises:
        UntraceableError: the model returns or writes a tensor of a data-dependent size.
    """
    for node in reversed(list(graph.nodes)):
        if not node.users and _is_about_sizes(node) and not mutated_arguments(node):
            graph.erase_node(node)
    write_out_of_place(graph, _is_open)
    regions = []
    seen: set[fx.Node] = set()
    for node in graph.nodes:
        if node not in seen and _is_open(node):
            regions.append(_region(graph, node))
            seen |= regions[-1]
    checks = [r for r in regions if not _leaving(r)]
    others = _apart([r for r in regions if _leaving(r)])
    if checks and others:
        last = others[-1].union(*checks)
        others = _apart([*others[:-1], last | _between(graph, last)])
    for region in others or checks:
        _replace(graph, [node for node in graph.nodes if node in region], line_of)


def _is_open(node: fx.Node) -> bool:
    """Whether a node's value has a data-dependent size."""
    if node.op != "call_function" or is_dynamic_region(node):
        return False
    return any(map(_has_symbol, tree_leaves(node.meta.get("val"))))


def _has_symbol(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return any(isinstance(size, torch.SymInt) for size in value.shape)
    return isinstance(value, py_sym_types)


def _is_about_sizes(node: fx.Node) -> bool:
    """Whether an operator makes or reads a data-dependent size, and does not check it."""
    if node.op != "call_function" or is_assertion(node):
        return False
    return _is_open(node) or any(map(_is_open, node.all_input_nodes))


def is_assertion(node: fx.Node) -> bool:
    """Whether a node checks a data-dependent size."""
    if node.target is not torch.ops.aten._assert_scalar.default:
        return False
    read = [n for c in node.all_input_nodes for n in (c, *c.all_input_nodes)]
    return any(map(_is_open, read)) and not any(map(_is_about_boolean, node.all_input_nodes))


def _is_about_boolean(node: fx.Node) -> bool:
    """Whether a node checks that a boolean is between 0 and 1, as torch writes down of its own."""
    is_boolean = any(n.target is torch.sym_ite for n in node.all_input_nodes)
    return is_boolean and node.target in (operator.ge, operator.le)


def _region(graph: fx.Graph, first: fx.Node) -> set[fx.Node]:
    """The region of an operator: all that is connected to it by data-dependent sizes."""
    inside = {first}
    while True:
        grown = inside | _joined(inside)
        grown |= _between(graph, grown)
        if grown == inside:
            return inside
        inside = grown


def _apart(regions: Iterable[set[fx.Node]]) -> list[set[fx.Node]]:
    """Disjoint regions: those that share a node become one."""
    found: list[set[fx.Node]] = []
    for region in regions:
        shared = [other for other in found if other & region]
        found = [other for other in found if not other & region]
        found.append(region.union(*shared))
    return found


def _leaving(inside: Collection[fx.Node]) -> list[fx.Node]:
    """Nodes of a region that others read, in order."""
    return [n for n in inside if any(user not in inside for user in n.users)]


def _joined(inside: Iterable[fx.Node]) -> set[fx.Node]:
    """Readers of values of data-dependent sizes in a region, and such values that it reads."""
    found: set[fx.Node] = set()
    for node in inside:
        if _is_open(node):
            found.update(user for user in node.users if user.op == "call_function")
        found.update(filter(_is_open, node.all_input_nodes))
        if node.target is operator.getitem:
            found.update(node.all_input_nodes)
    return found


def _between(graph: fx.Graph, inside: set[fx.Node]) -> set[fx.Node]:
    """Nodes on a path that leaves a region and comes back to it."""
    after, before = set(inside), set(inside)
    for node in graph.nodes:
        if not after.isdisjoint(node.all_input_nodes):
            after.add(node)
    for node in reversed(graph.nodes):
        if not before.isdisjoint(node.users):
            before.add(node)
    return (after & before) - inside


def _replace(graph: fx.Graph, inside: list[fx.Node], line_of: Callable[[fx.Node], str]) -> None:
    members = set(inside)
    leaving = [n for n in inside if any(user not in members for user in n.users)]
    read = dict.fromkeys(a for m in inside for a in m.all_input_nodes)
    given = [node for node in read if node not in members]
    _refuse(graph, inside, leaving, line_of)
    call = _call(graph, inside, given, leaving)
    sizes = tuple(tuple(node.meta["val"].shape) for node in leaving)
    call.meta["region"] = DynamicRegion(
        _packed(inside, given, leaving, line_of), sizes, line_of(inside[0])
    )
    with graph.inserting_after(call):
        for number, node in reversed(list(enumerate(leaving))):
            one = graph.call_function(operator.getitem, (call, number))
            one.meta = {k: v for k, v in node.meta.items() if k in _SOURCE_META}
            node.replace_all_uses_with(one, delete_user_cb=lambda user: user not in members)
    for node in reversed(inside):
        graph.erase_node(node)


_SOURCE_META = ("val", "stack_trace", "nn_module_stack")


def _call(
    graph: fx.Graph, inside: Sequence[fx.Node], given: Sequence[fx.Node], leaving: Sequence[fx.Node]
) -> fx.Node:
    """Insert the region's node: after all that it reads, and before all that read it."""
    last = inside[-1]
    order = {node: i for i, node in enumerate(graph.nodes)}
    late = _readers(leaving, set(inside))
    ahead = [node for node in graph.nodes if node in late and order[node] < order[last]]
    vals = [node.meta["val"] for node in leaving]
    outputs = tuple(TensorMeta(tuple(v.shape), v.dtype) for v in vals)
    known = _bound(given)
    cost = CallCost(outputs, _saved(inside, known), _flops(inside, known))
    with graph.inserting_after(last):
        call = graph.call_function(OPAQUE_CALL, ([], list(given), cost.to_json()))
    call.meta = {k: v for k, v in inside[0].meta.items() if k in _SOURCE_META} | {
        "val": tuple(vals)
    }
    for node in reversed(ahead):
        call.append(node)
    return call


def _readers(leaving: Iterable[fx.Node], inside: set[fx.Node]) -> set[fx.Node]:
    """Nodes outside a region that depend on it."""

    def outer(node: fx.Node) -> set[fx.Node]:
        return node.users.keys() - inside

    return reachable((user for node in leaving for user in outer(node)), outer)


def _refuse(
    graph: fx.Graph,
    inside: Sequence[fx.Node],
    leaving: Sequence[fx.Node],
    line_of: Callable[[fx.Node], str],
) -> None:
    """Refuse a region that returns data-dependent sizes, or whose writes would be reordered."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    members, first, last = set(inside), order[inside[0]], order[inside[-1]]
    late = {n for n in _readers(leaving, members) if order[n] < last}
    moved = [*members, *late]
    touched = {_storage(n) for m in moved for n in (m, *m.all_input_nodes)} - {None}
    outer = {_storage(n) for n in graph.nodes if n not in members} - {None}
    for node in list(graph.nodes)[first : last + 1]:
        written = {_storage(argument) for argument in mutated_arguments(node)}
        if written & (outer if node in members else touched):
            refuse_dynamic_shape(line_of(inside[0]), _first_open(inside))
    for node in leaving:
        if not isinstance(node.meta["val"], torch.Tensor) or _is_open(node):
            refuse_dynamic_shape(line_of(node), _first_open(inside))


def _first_open(inside: Iterable[fx.Node]) -> Any:
    values = (leaf for node in inside for leaf in tree_leaves(node.meta.get("val")))
    return next(v for v in values if isinstance(v, torch.Tensor) and _has_symbol(v))


def _storage(node: fx.Node) -> int | None:
    return storage_of(node.meta.get("val"))


def _packed(
    inside: Sequence[fx.Node],
    given: Sequence[fx.Node],
    leaving: Sequence[fx.Node],
    line_of: Callable[[fx.Node], str],
) -> tuple[Any, ...]:
    graph = fx.Graph()
    env = {node: graph.placeholder(node.name) for node in given}
    line = line_of(inside[0])
    for node in inside:
        if is_assertion(node):
            graph.call_function(_check, (env[node.all_input_nodes[0]], line_of(node) or line))
            continue
        env[node] = graph.node_copy(node, env.__getitem__)
        env[node].meta = {}
    graph.output(tuple(env[node] for node in leaving))
    return pack(graph)


# An upper bound of its cost


def _bound(given: Iterable[fx.Node]) -> int:
    """The most elements that may be selected: as many as a mask has."""
    vals = [n.meta["val"] for n in given if isinstance(n.meta.get("val"), torch.Tensor)]
    masks = [v.numel() for v in vals if not v.is_floating_point()]
    return max(
        (int(n) for n in masks), default=max((int(s) for v in vals for s in v.shape), default=1)
    )


def _sizes(value: torch.Tensor, known: int) -> tuple[int, ...]:
    """The sizes of a tensor, with a number for every data-dependent size."""
    return tuple(_number(size, known) for size in value.shape)


def _number(size: int | torch.SymInt, known: int) -> int:
    if not isinstance(size, torch.SymInt):
        return size
    expression = size.node.expr
    found = expression.subs({s: sympy.Integer(known) for s in expression.free_symbols})
    return int(found) if found.is_Integer else known


def _saved(inside: Iterable[fx.Node], known: int) -> int:
    vals = [leaf for node in inside for leaf in tree_leaves(node.meta.get("val"))]
    real = [v for v in vals if isinstance(v, torch.Tensor) and v.is_floating_point()]
    return sum(math.prod(_sizes(v, known)) * v.dtype.itemsize for v in real)


def _flops(inside: Iterable[fx.Node], known: int) -> int:
    total = 0
    for node in inside:
        if aten_family(node.target) in DENSE_GEMMS:
            inner = _sizes(node.all_input_nodes[-1].meta["val"], known)[-1]
            total += 2 * math.prod(_sizes(node.meta["val"], known)) * inner
    return total
