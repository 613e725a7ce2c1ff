"""Passes that make an exported graph plain: flat, with metadata, without no-ops."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import fx

from merak.core.errors import TraceError
from merak.core.source_lines import with_text
from merak.core.storages import storage_of
from merak.core.tensor_meta import TensorMeta, requires_grad
from merak.graph.ir.custom_operators import custom_operator
from merak.graph.ir.ir import Kind, ParameterWrites
from merak.graph.ir.mutation import mutated_arguments
from merak.graph.ir.operators import (
    ASSERTIONS,
    CONVOLUTIONS,
    DENSE_GEMMS,
    DROPOUTS,
    FILLS_LIKE,
    FILLS_NEW,
    RANDOM_LIKE,
    TRANSPOSED_CONVOLUTIONS,
    aten_family,
    draws,
)
from merak.graph.ir.state_read import StateRead
from merak.graph.trace.autocast import AUTOCAST_DONE, write_out_autocast
from merak.graph.trace.autograd.calls import is_autograd_call, is_gradient_switch
from merak.graph.trace.autograd.expand import CONSTANT
from merak.graph.trace.autograd.steps import AUTOCAST
from merak.graph.trace.explain import UntraceableError, refuse_dynamic_shape
from merak.graph.trace.node_source import frames_of, line_of, modules_of
from merak.graph.trace.opaque.dynamic_region import (
    DynamicSizes,
    gather_dynamic_regions,
    is_assertion,
)

aten = torch.ops.aten

_CONVERSIONS = {"aten.to.dtype_layout", "aten.to.dtype", "aten.to.device", "aten.to.other"}
_RETURN_THEMSELVES = {"aten.contiguous.default"}
_COPIES = {"aten.lift_fresh_copy.default"}
_KNOWN_NAMESPACES = ("aten", "prim", "prims")
_NO_GRADIENT = FILLS_LIKE | FILLS_NEW | RANDOM_LIKE | {"detach"}


@dataclass(slots=True)
class Rewriting:
    """An exported graph that passes rewrite, and their findings.

    Args:
        graph: changed in place.
        constants: tensors that are neither parameters nor buffers, by name.
        sizes: policy for data-dependent sizes.
        sources: source files that nodes come from.
        columns: the batch, where it is known.
        buffers: the model's own, by name.
        parameter_writes: writes into parameters, taken out of the graph.
        queried: as of `ModelGraph`.
        reads: state of the model that passes have made constants of.
    """

    graph: fx.Graph
    constants: dict[str, torch.Tensor]
    sizes: DynamicSizes = DynamicSizes.REFUSED
    columns: Mapping[str, TensorMeta] = field(default_factory=dict)
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    sources: set[str] = field(default_factory=set)
    parameter_writes: tuple[ParameterWrites, ...] = ()
    queried: set[str] = field(default_factory=set)
    reads: list[StateRead] = field(default_factory=list)


def refuse_vmap(rewriting: Rewriting) -> None:
    """Refuse `torch.vmap` where it could not run as plain operators.

    Raises:
        UntraceableError: the graph has one.
    """
    for node in rewriting.graph.nodes:
        if getattr(node.target, "__module__", "") == "torch._functorch.predispatch":
            where = line_of(node) or "an unknown line"
            raise UntraceableError(
                f"the model cannot be traced at {where}: torch.vmap runs there on values that "
                "have gradients, or draws random numbers, the inside of which cannot be cut; write "
                "it with broadcasting, or switch the feature off in the model's config.",
                f"{where}: torch.vmap runs there on values that have gradients, or draws numbers",
                modules_of(node),
            )


_OF_ONE_TYPE = frozenset(
    DENSE_GEMMS
    | CONVOLUTIONS
    | TRANSPOSED_CONVOLUTIONS
    | {"convolution", "bilinear", "mv", "addmv", "layer_norm", "group_norm", "batch_norm"}
    | {"native_batch_norm", "binary_cross_entropy", "grid_sampler", "cdist"}
)
"""Operators that want operands of one type, which fake tensors do not check."""

_SHORT = (torch.float16, torch.bfloat16)
"""Types of which an operator may have statistics and weights in float32."""


def refuse_mixed_types(rewriting: Rewriting) -> None:
    """Refuse operands of different types where torch does: only its kernels tell.

    Raises:
        TraceError: the graph has such an operator, or class numbers of a type without a kernel.
    """
    for node in rewriting.graph.nodes:
        family = aten_family(node.target)
        own = [a for a in node.all_input_nodes if isinstance(a.meta.get("tensor"), TensorMeta)]
        types = [a.meta["tensor"].dtype for a in own]
        if family in _OF_ONE_TYPE and len(set(types)) > 1:
            if "norm" in family and types[0] in _SHORT:
                continue
            wrong = next((a for a in own if _column_of(a)), own[0])
            others = (t for t in types if t != wrong.meta["tensor"].dtype)
            _refuse_type(node, wrong, next(others))
        elif family in ("cross_entropy_loss", "nll_loss", "nll_loss_nd") and len(own) > 1:
            numbers = own[1].meta["tensor"].dtype
            if not numbers.is_floating_point and numbers not in (torch.int64, torch.uint8):
                _refuse_type(node, own[1], torch.int64)


def _column_of(node: fx.Node) -> str:
    """A column of the batch that gives a tensor its type; "" for none."""
    seen, found = {node}, [node]
    for one in found:
        if one.meta.get("kind") is Kind.COLUMN:
            return str(one.meta["name"])
        same = [a for a in one.all_input_nodes if _has_type_of(a, node) and a not in seen]
        found += same
        seen |= {*same}
    return ""


def _has_type_of(one: fx.Node, other: fx.Node) -> bool:
    meta = one.meta.get("tensor")
    return isinstance(meta, TensorMeta) and meta.dtype == other.meta["tensor"].dtype


def _refuse_type(node: fx.Node, wrong: fx.Node, wanted: torch.dtype) -> NoReturn:
    column, own = _column_of(wrong), wrong.meta["tensor"].dtype
    what = f"the column {column!r} of the batch is" if column else "a tensor is"
    fix = "convert the column" if column else "convert it"
    place = node.meta.get("source")
    where = with_text(place) if place else "an unknown line"
    raise TraceError(
        f"the model or its loss fails, traced or not, at {where}: {what} {own}, and "
        f"{aten_family(node.target)} needs {wanted} there; {fix} with .to({wanted})."
    )


def erase_assertions(rewriting: Rewriting) -> None:
    """Erase assertions, but for those about data-dependent sizes that a region will check."""
    are_checked = rewriting.sizes is not DynamicSizes.REFUSED
    for node in list(rewriting.graph.nodes):
        if aten_family(node.target) in ASSERTIONS and not (are_checked and is_assertion(node)):
            rewriting.graph.erase_node(node)


def drop_device_indices(rewriting: Rewriting) -> None:
    """Name devices by their type alone: the graph of one rank runs on other ranks' devices."""
    for node in rewriting.graph.nodes:
        node.args = fx.node.map_aggregate(node.args, _any_of_its_kind)
        node.kwargs = fx.node.map_aggregate(node.kwargs, _any_of_its_kind)


def gather_regions(rewriting: Rewriting) -> None:
    """Put operators on data-dependent sizes into data-dependent regions, where that is allowed."""
    if rewriting.sizes is not DynamicSizes.REFUSED:
        gather_dynamic_regions(rewriting.graph, line_of)


def set_metadata(rewriting: Rewriting) -> None:
    """Replace torch's metadata of every node by Merak's."""
    memory = _Memory()
    for node in list(rewriting.graph.nodes):
        _set_meta(node, rewriting.sources, memory)


def erase_no_ops(rewriting: Rewriting) -> None:
    """Erase operators that return their argument, and empty operands of `cat`."""
    graph = rewriting.graph
    written = {a.meta["storage"] for n in graph.nodes for a in mutated_arguments(n)}
    for node in list(graph.nodes):
        if (replaced := _without_effect(node, written)) is not None:
            node.replace_all_uses_with(replaced)
            graph.erase_node(node)
    for node in graph.find_nodes(op="call_function", target=aten.cat.default):
        _drop_empty_parts(node)


def _any_of_its_kind(value: Any) -> Any:
    """A device by its type alone; any other argument as it is."""
    return torch.device(value.type) if isinstance(value, torch.device) else value


def slice_neighbours(rewriting: Rewriting) -> None:
    """Replace indices of contiguous elements, such as `x[:, [-2]]`, by copies of slices."""
    graph, constants = rewriting.graph, rewriting.constants
    for node in graph.find_nodes(op="call_function", target=aten.index.Tensor):
        x, positions = node.args
        found = [(dim, i) for dim, i in enumerate(positions) if i is not None]
        if len(found) != 1:
            continue
        ((dim, index),) = found
        numbers = constants.get(index.meta.get("name", ""))
        span = _neighbours(numbers, x.meta["tensor"].shape[dim])
        if not span:
            continue
        with graph.inserting_before(node):
            taken = graph.call_function(aten.slice.Tensor, (x, dim, span[0], span[-1] + 1))
            copy = graph.call_function(aten.clone.default, (taken,))
        taken.meta, copy.meta = dict(node.meta), dict(node.meta)
        if "storage" in x.meta:
            taken.meta["storage"] = x.meta["storage"]
        node.replace_all_uses_with(copy)
        graph.erase_node(node)


def _neighbours(numbers: torch.Tensor | None, size: int) -> list[int]:
    """The positions in a dim, if they are contiguous; else none."""
    if numbers is None or numbers.ndim != 1 or numbers.dtype not in (torch.int64, torch.int32):
        return []
    span = [int(n) % size for n in numbers]
    return span if span == list(range(span[0], span[0] + len(span))) else []


class _Memory:
    """Numbers storages, and notes into which a gradient was written."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._members: dict[int, list[fx.Node]] = {}
        self._carrying: set[int] = set()

    def number(self, node: fx.Node, value: Any) -> int | None:
        """The number of a node's storage; None where it returns no single tensor."""
        storage = storage_of(value)
        if storage is None:
            return None
        known = _written_into(node)
        if known is not None:  # torch gives what is written into a constant a storage of its own
            number = self._numbers[storage] = known
        else:
            number = self._numbers.setdefault(storage, len(self._numbers))
        self._members.setdefault(number, []).append(node)
        return number

    def carries(self, number: int | None) -> bool:
        """Whether a tensor with a gradient has been written into a storage."""
        return number in self._carrying

    def write(self, number: int | None) -> None:
        """Note that a tensor with a gradient is written into a storage: its views have one."""
        if number is None or number in self._carrying:
            return
        self._carrying.add(number)
        for node in self._members[number]:
            meta = node.meta["tensor"]
            if meta.dtype.is_floating_point or meta.dtype.is_complex:
                node.meta["tensor"] = replace(meta, requires_grad=True)


def _written_into(node: fx.Node) -> int | None:
    """The storage of the one argument that an operator writes and returns; None for no such one."""
    written = mutated_arguments(node)
    if len(written) != 1:
        return None
    returned: Any = node.target._schema.returns  # type: ignore[union-attr]
    alias = returned[0].alias_info if len(returned) == 1 else None
    number = written[0].meta["storage"] if alias is not None and alias.is_write else None
    return number if isinstance(number, int) else None


def is_random(node: fx.Node) -> bool:
    """Whether an operator draws random numbers; assumed of operators of unknown libraries."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    own = custom_operator(target)
    is_known = own.is_deterministic if own else target.namespace in _KNOWN_NAMESPACES
    if not is_known:
        return True
    if not draws(target):
        return False
    values = {a.name: a.default_value for a in target._schema.arguments}
    values |= dict(zip(values, node.args, strict=False)) | node.kwargs
    never = any(name in values and values[name] == 0 for name in ("p", "dropout", "dropout_p"))
    asleep = any(values.get(name) is False for name in ("train", "training"))
    return not never and not asleep


def inline_subgraphs(graph: fx.Graph) -> None:
    """Replace `wrap_with_set_grad_enabled` and `wrap_with_autocast` by the graphs they wrap."""
    module = graph.owning_module
    for node in graph.nodes:
        for operand in node.all_input_nodes:
            # Export forgets dead readers whose operands it has put in a subgraph of autocast.
            operand.users.setdefault(node)
    for node in list(graph.nodes):
        if not isinstance(node.target, torch._ops.HigherOrderOperator):
            continue
        name = node.target.name()
        if name not in ("wrap_with_set_grad_enabled", "wrap_with_autocast"):
            continue
        position = next(i for i, a in enumerate(node.args) if isinstance(a, fx.Node))
        body: Any = getattr(module, str(node.args[position].target))
        settings, args = node.args[:position], node.args[position + 1 :]
        inline_subgraphs(body.graph)
        if name == "wrap_with_autocast":
            _finish_autocast(body.graph, settings, args)
        _inline(graph, node, body.graph, args, settings == (False,))
    for node in list(graph.find_nodes(op="get_attr")):
        if not node.users:
            graph.erase_node(node)


def _finish_autocast(body: fx.Graph, settings: tuple[Any, ...], args: tuple[Any, ...]) -> None:
    """Write conversions out; an outer autocast does not change what is left."""
    device_type, dtype, enabled, _ = settings
    for node in filter(is_autograd_call, body.nodes):
        node.meta.setdefault(AUTOCAST, (device_type, dtype, enabled))
        node.meta[AUTOCAST_DONE] = True
    if enabled:
        placeholders = zip(body.find_nodes(op="placeholder"), args, strict=True)
        weights = {p for p, a in placeholders if a.meta.get("kind") is Kind.PARAMETER}
        write_out_autocast(body, device_type, dtype, weights)
    for node in body.nodes:
        node.meta[AUTOCAST_DONE] = True


def _inline(
    graph: fx.Graph, call: fx.Node, body: fx.Graph, args: tuple[Any, ...], detached: bool
) -> None:
    """Replace a call by its body; without gradients, on detached arguments.

    Detached arguments, rather than results: some operators refuse arguments that carry a gradient.
    """
    results: tuple[Any, ...] = ()
    outer = dict(zip(body.find_nodes(op="placeholder"), args, strict=True))
    with graph.inserting_before(call):
        env = {p: _detach(graph, a) if detached else a for p, a in outer.items()}
        for node in body.nodes:
            if node.op == "output":
                found = node.args[0] if isinstance(node.args[0], (tuple, list)) else node.args
                found = [_same_tensor(n) if isinstance(n, fx.Node) else n for n in found]
                results = tuple(outer.get(n, env.get(n, n)) for n in found)
            elif node.op != "placeholder":
                # No gradient is detached from what it is taken of.
                whole = is_autograd_call(node) or is_gradient_switch(node)
                env[node] = graph.node_copy(node, (env | outer if whole else env).__getitem__)
    for user in list(call.users):
        if user.target is not operator.getitem:
            raise AssertionError(f"{user} reads the tuple of {call} as a whole")
        place = user.args[1]
        assert isinstance(place, int)
        user.replace_all_uses_with(results[place])
        graph.erase_node(user)
    graph.erase_node(call)


def _same_tensor(node: fx.Node) -> fx.Node:
    """The argument that a node returns, gradient included, even without gradients; else the node.

    A conversion to what a tensor is already returns that tensor, and a write the one written into.
    """
    source = node.args[0] if node.args else None
    if not isinstance(node.target, torch._ops.OpOverload) or not isinstance(source, fx.Node):
        return node
    given, made = source.meta.get("val"), node.meta.get("val")
    if not isinstance(given, torch.Tensor) or not isinstance(made, torch.Tensor):
        return node
    same = (given.dtype, given.device, given.stride()) == (made.dtype, made.device, made.stride())
    copies = node.kwargs.get("copy", False) or any(a is True for a in node.args[2:])
    returned = node.target._schema.returns
    alias = returned[0].alias_info if len(returned) == 1 else None
    if alias is not None and alias.is_write:
        return _same_tensor(mutated_arguments(node)[0])  # not always the first one: `out=`
    unchanged = str(node.target) in (_CONVERSIONS | _RETURN_THEMSELVES) and same and not copies
    return _same_tensor(source) if unchanged else node


def _detach(graph: fx.Graph, source: Any) -> Any:
    if not isinstance(source, fx.Node) or not isinstance(source.meta.get("val"), torch.Tensor):
        return source
    node = graph.call_function(aten.detach.default, (source,))
    node.meta |= {k: v for k, v in source.meta.items() if k in ("val", "stack_trace")}
    return node


def _set_meta(node: fx.Node, sources: set[str], memory: _Memory) -> None:
    sources.update(file for file, _ in frames_of(node))
    where, modules = line_of(node), modules_of(node)
    value = node.meta.get("val")
    if node.op != "output":
        refuse_dynamic_shape(where, value, modules)
    carries = _carries_gradient(node)
    own: dict[str, Any] = {
        k: node.meta[k] for k in ("kind", "name", "opaque", "region") if k in node.meta
    }
    number = memory.number(node, value)
    tensor = tensor_meta(value, carries or memory.carries(number))
    node.meta = own | {
        "tensor": tensor,
        "source": where,
        "module": modules[-1] if modules else "",
        "storage": number,
    }
    if carries and node.op == "call_function":
        for written in mutated_arguments(node):
            memory.write(written.meta["storage"])


def tensor_meta(value: Any, requires_grad: bool) -> Any:
    """The metadata of a node's fake value."""
    if isinstance(value, torch.Tensor):
        gradient = requires_grad and (value.is_floating_point() or value.is_complex())
        shape, is_sparse = tuple(int(s) for s in value.shape), value.layout is not torch.strided
        return TensorMeta(shape, value.dtype, gradient, is_sparse=is_sparse)
    if isinstance(value, (tuple, list)):
        return tuple(tensor_meta(v, requires_grad) for v in value)
    return None


def _carries_gradient(node: fx.Node) -> bool:
    if node.op == "placeholder":
        return bool(
            node.meta.get("kind") is Kind.PARAMETER
            and getattr(node.meta.get("val"), "requires_grad", True)
        )
    if aten_family(node.target) in _NO_GRADIENT or node.meta.get(CONSTANT):
        return False
    return any(requires_grad(parent.meta.get("tensor")) for parent in node.all_input_nodes)


def _drop_empty_parts(cat: fx.Node) -> None:
    """Drop operands of `cat` of shape (0,): a key-value cache begins with one."""
    parts: Any = cat.args[0]
    nonempty = [part for part in parts if part.meta["tensor"].shape != (0,)]
    same_type = len({part.meta["tensor"].dtype for part in parts}) == 1
    if nonempty and len(nonempty) < len(parts) and same_type:
        cat.args = (nonempty, *cat.args[1:])


def _without_effect(node: fx.Node, written: set[int | None]) -> fx.Node | None:
    """The argument that a no-op returns; None for any other operator."""
    name = str(node.target)
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    if name == "aten.alias.default" or (name in _COPIES and node.meta["storage"] not in written):
        return source
    if name == "aten.detach.default" and not requires_grad(source.meta["tensor"]):
        return source
    if aten_family(node.target).rstrip("_") in DROPOUTS and (node.args[1] == 0 or not node.args[2]):
        return source
    same = node.meta.get("tensor") == source.meta.get("tensor")
    copies = node.kwargs.get("copy", False) or any(a is True for a in node.args[2:])
    if name in _CONVERSIONS and same and not copies:
        return source
    return None
