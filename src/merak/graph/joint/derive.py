"""Derivation of a joint graph: a segment runs on fake tensors, forward and backward.

Every operator beneath autograd is recorded with its arguments, so the graph has what autograd
would run, in its order: gradients are equal to the bit.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from merak.core.storages import Storages
from merak.graph.ir.ir import Kind
from merak.graph.ir.operators import draws
from merak.ops.recording import RowCount, recorded_by, row_count


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the elements of a tensor lie.

    Args:
        shape: sizes of its dims.
        stride: elements between two along each dim.
        dtype: type of its elements.
        offset: its first element in the storage.
        storage: number of the storage in its graph.
        storage_bytes: of the storage.
        lazy: whether its elements are to be conjugated, and negated.
        device: where they are.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    storage: int
    storage_bytes: int
    lazy: tuple[bool, bool]
    device: torch.device

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


Strides = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Given:
    """Gradients that a segment's backward is given.

    Args:
        tangents: per output, the strides of its gradient; None where it has none.
        later: numbers of inputs and parameters, and the strides of the sum that later readers give.
    """

    tangents: tuple[Strides | None, ...]
    later: tuple[tuple[int, Strides], ...] = ()


@dataclass(frozen=True, slots=True)
class JointGraph:
    """Forward and backward of a segment as one graph.

    Every node has its `Layout` in `meta["layout"]`, None where it is no tensor: bytes of several
    results are in `meta["results"]`, by storage. A function that is one operator has the most that
    it takes in `meta["taken_bytes"]`. Nodes of the backward have `meta["is_backward"]`, those of
    the forward the name of the segment's operator that runs them in `meta["origin"]`.

    Args:
        graph: its placeholders are those of the segment, later sums, and gradients of outputs.
        given: gradients that its backward is given.
        arguments: placeholders of the segment, in order, with their kind.
        later: placeholders of later sums, by number of the argument.
        tangents: placeholders of the gradients of outputs, by number of the output.
        outputs: of the segment, in order.
        gradients: by number of the argument; one that has no gradient is missing.
        carries: per output, whether a gradient goes back through it.
    """

    graph: fx.Graph
    given: Given
    arguments: list[fx.Node]
    later: dict[int, fx.Node]
    tangents: dict[int, fx.Node]
    outputs: list[fx.Node]
    gradients: dict[int, fx.Node]
    carries: tuple[bool, ...]

    @property
    def inputs(self) -> frozenset[int]:
        """Numbers of the arguments that other segments have made."""
        kinds = [node.meta["kind"] for node in self.arguments]
        return frozenset(number for number, kind in enumerate(kinds) if kind is Kind.VALUE)


class JointError(Exception):
    """A segment whose backward is no graph, with the reason."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """A number of rows that values say.

    Args:
        number: of it among the graph's.
        size: that the graph is recorded with.
        says: what says it.
    """

    number: int
    size: int
    says: RowCount


class _Recorder(TorchDispatchMode):
    """Records the operators that run beneath autograd, as nodes of a graph."""

    def __init__(self, graph: fx.Graph, doubled: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = graph
        self.counts: dict[fx.Node, _Rows] = {}
        self._doubled = doubled  # which numbers of rows are twice as large
        self.is_backward = False
        self.origin = ""  # the operator of the segment that runs
        self._is_inside = False  # a function that is one operator
        self._nodes: dict[int, fx.Node] = {}
        self._kept: list[torch.Tensor] = []
        self._storages: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._is_inside:
            return result
        if func.namespace in ("c10d", "_c10d_functional"):
            raise JointError(f"{func} sends to other ranks")
        if func in decomposition_table and isinstance(result, torch.Tensor) and not draws(func):
            result = _as_kernel_lays(func, args, result) if not kwargs else result
        if func in _BATCH_NORMS and isinstance(result[0], torch.Tensor):
            result = (_as_kernel_lays(func, args, result[0]), *result[1:])
        if isinstance(result, torch.Tensor | tuple | list):
            self._record(func, args, kwargs, result)
        elif result is None and not func._schema.returns:  # it checks what it reads
            self._record(func, args, kwargs, ())
        elif func.namespace != "prim" and _tensors((args, kwargs)):  # as not of `promote_types`
            raise JointError(f"{func} gives a value, not a tensor")
        return result

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function that is one operator."""
        if self._is_inside:
            return function(*args, **kwargs)
        self._is_inside = True
        try:
            with Storages(_tensors((args, kwargs))) as storages:
                result = self._counted(function, args, function(*args, **kwargs))
        finally:
            self._is_inside = False
        self._record(function, args, kwargs, result).meta["taken_bytes"] = storages.peak_bytes
        return result

    def _counted(self, function: Any, args: tuple[Any, ...], result: Any) -> Any:
        """Result of a call, with as many rows as it is recorded with."""
        found = row_count(function, args)
        if found is None:
            return result
        counts, shape = self.node(found.counts), result.shape
        rows = self.counts.setdefault(counts, _Rows(len(self.counts), shape[0], found))
        return result if rows.number != self._doubled else torch.cat([result, result])

    def placeholder(self, name: str, tensor: torch.Tensor) -> fx.Node:
        """Placeholder of a tensor."""
        return self._note(self.graph.placeholder(name), tensor)

    def node(self, tensor: torch.Tensor) -> fx.Node:
        """Node that yields a tensor."""
        found = self._nodes.get(id(tensor))
        if found is None:
            raise JointError("it reads a tensor that no operator of it has made")
        return found

    def _record(self, func: Any, args: Any, kwargs: Any, result: Any) -> fx.Node:
        """Record a call; numbers among its results, such as lengths, follow from its layouts."""
        args, kwargs = self._plain(args), self._plain(kwargs)
        node = self.graph.call_function(func, args, kwargs)
        if isinstance(result, torch.Tensor):
            return self._note(node, result)
        made = [self._layout(one) for one in result if isinstance(one, torch.Tensor)]
        node.meta = {**self._meta(None), "results": {m.storage: m.storage_bytes for m in made}}
        for place, one in enumerate(result):
            if isinstance(one, torch.Tensor):
                self._note(self.graph.call_function(operator.getitem, (node, place)), one)
            elif isinstance(one, tuple | list):
                raise JointError(f"{func} gives lists of tensors")
        return node

    def _plain(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.node(value)
        if isinstance(value, tuple | list):
            return type(value)(map(self._plain, value))
        if isinstance(value, dict):
            return {key: self._plain(one) for key, one in value.items()}
        return value

    def _note(self, node: fx.Node, tensor: torch.Tensor) -> fx.Node:
        self._nodes[id(tensor)] = node
        self._kept.append(tensor)
        node.meta = self._meta(self._layout(tensor))
        return node

    def _meta(self, layout: Layout | None) -> dict[str, Any]:
        return {"layout": layout, "is_backward": self.is_backward, "origin": self.origin}

    def _layout(self, tensor: torch.Tensor) -> Layout:
        if tensor.layout is not torch.strided:
            raise JointError("it makes sparse tensors")
        storage = tensor.untyped_storage()
        number = self._storages.setdefault(storage._cdata, len(self._storages))
        return Layout(
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
            int(tensor.storage_offset()),
            number,
            storage.nbytes(),
            (tensor.is_conj(), tensor.is_neg()),
            tensor.device,
        )


def derive(graph: fx.Graph, like: Sequence[Any], given: Given | None) -> JointGraph:
    """Joint graph of a segment's graph.

    Where values decide how many rows some tensors have, as of experts' rows that ranks exchange,
    the graph holds for any number: what changes with it is computed where it runs.

    Args:
        graph: operators as they run; its placeholders carry their kind and metadata.
        like: its arguments, or what is laid out as they are.
        given: gradients that its backward is given; None for one of each output, laid out as
            `torch.empty_like` would.

    Raises:
        JointError: the backward is no graph.
    """
    joint, counts = _derive(graph, like, given, None)
    others = [_derive(graph, like, given, rows.number)[0].graph for rows in counts.values()]
    _free_sizes(joint.graph, counts, others)
    return joint


def _free_sizes(
    graph: fx.Graph, counts: Mapping[fx.Node, _Rows], others: Sequence[fx.Graph]
) -> None:
    """Compute what changes with the number of rows, as graphs with twice as many show, each."""
    nodes = list(graph.nodes)
    for (counted, rows), other in zip(counts.items(), others, strict=True):
        made: dict[Any, fx.Node] = {}

        def size_of(
            node: fx.Node,
            one: int,
            two: int,
            counted: fx.Node = counted,
            rows: _Rows = rows,
            made: dict[Any, fx.Node] = made,
        ) -> fx.Node:
            key = one, two, node.meta["is_backward"]
            if key not in made:
                line = rows.size, one, two
                args: Any = (rows.says.count, counted, rows.says.axis, line)
                with graph.inserting_before(node):
                    made[key] = graph.call_function(number_at, args)
                made[key].meta = {**node.meta, "layout": None, "number": one}
            return made[key]

        twins = list(other.nodes)
        if [node.target for node in nodes] != [twin.target for twin in twins]:
            raise JointError("its operators depend on a number of rows")
        for node, twin in zip(nodes, twins, strict=True):
            node.args = _where_different(node.args, twin.args, partial(size_of, node))
            node.kwargs = _where_different(node.kwargs, twin.kwargs, partial(size_of, node))


def _where_different(one: Any, two: Any, size_of: Callable[[int, int], fx.Node]) -> Any:
    """Arguments of a call, with nodes for sizes in which those of another one differ."""
    if isinstance(one, tuple | list) and len(one) == len(two):
        return type(one)(_where_different(a, b, size_of) for a, b in zip(one, two, strict=True))
    if isinstance(one, dict):
        return {key: _where_different(value, two[key], size_of) for key, value in one.items()}
    if isinstance(one, fx.Node):
        other = two.name if isinstance(two, fx.Node) else two
        if other in (one.name, one.meta.get("number")):
            return one
    elif type(one) is type(two) and (one == two or one != one):  # not a number
        return one
    elif type(one) is int and type(two) is int:
        return size_of(one, two)
    raise JointError("what an operator is given depends on a number of rows")


def number_at(
    count: Callable[[Any, str], int], counts: torch.Tensor, axis: str, line: tuple[int, int, int]
) -> int:
    """A size that grows with a number of rows.

    Args:
        count: gives the number of rows, of `counts` and `axis`.
        counts: of the rows.
        axis: of the ranks that have them.
        line: a number of rows, and the size with so many and with twice as many.
    """
    rows, size, doubled = line
    return size + (doubled - size) * (count(counts, axis) - rows) // rows


def _derive(
    graph: fx.Graph, like: Sequence[Any], given: Given | None, doubled: int | None
) -> tuple[JointGraph, Mapping[fx.Node, _Rows]]:
    recorder = _Recorder(fx.Graph(), doubled)
    placeholders = list(graph.find_nodes(op="placeholder"))
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.autograd.set_multithreading_enabled(False),
        torch.enable_grad(),
        recorded_by(recorder.call),
    ):
        arguments = [_fresh(tensor, tensor.stride()) for tensor in like]
        nodes = [recorder.placeholder(f"argument_{i}", a) for i, a in enumerate(arguments)]
        for node, placeholder in zip(nodes, placeholders, strict=True):
            node.meta["kind"] = placeholder.meta["kind"]
        leaves = {
            number: arguments[number].requires_grad_()
            for number, placeholder in enumerate(placeholders)
            if _carries_gradient(placeholder)
        }
        with recorder:
            outputs = _forward(graph, dict(zip(placeholders, arguments, strict=True)), recorder)
        results = [recorder.node(output) for output in outputs]
        carries = tuple(output.requires_grad for output in outputs)
        if given is None:
            strides = [torch.empty_like(out).stride() for out in outputs]
            given = Given(tuple(s if o.requires_grad else None for s, o in zip(strides, outputs)))
        recorder.is_backward, recorder.origin = True, ""
        later = {number: _fresh(leaves[number], stride) for number, stride in given.later}
        tangents = {
            number: _fresh(out, stride)
            for number, (out, stride) in enumerate(zip(outputs, given.tangents, strict=True))
            if stride is not None
        }
        later_nodes = {i: recorder.placeholder(f"later_{i}", t) for i, t in later.items()}
        tangent_nodes = {i: recorder.placeholder(f"tangent_{i}", t) for i, t in tangents.items()}
        with recorder:
            roots = [*(leaves[i] for i in later), *(outputs[i] for i in tangents)]
            given_roots = [*later.values(), *tangents.values()]
            found = (
                torch.autograd.grad(roots, list(leaves.values()), given_roots, allow_unused=True)
                if leaves
                else ()
            )
        gradients = {
            number: recorder.node(gradient)
            for number, gradient in zip(leaves, found, strict=True)
            if gradient is not None
        }
    recorder.graph.output((tuple(results), tuple(gradients.values())))
    return JointGraph(
        recorder.graph, given, nodes, later_nodes, tangent_nodes, results, gradients, carries
    ), recorder.counts


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _fresh(like: Any, stride: Sequence[int]) -> torch.Tensor:
    return torch.empty_strided(like.shape, stride, dtype=like.dtype, device=like.device)


_BATCH_NORMS = (
    torch.ops.aten.native_batch_norm.default,
    torch.ops.aten.native_batch_norm_backward.default,
)
"""Whose first result is laid out by itself, whatever lies otherwise among what they read."""


def _as_kernel_lays(func: Any, args: Any, made: torch.Tensor) -> torch.Tensor:
    """Result of an operator as its kernel lays it out.

    A decomposition, which runs on fake tensors, may lay it out after another of its operands, such
    as that of `softplus_backward`. The kernel is asked by a few elements that lie alike.
    """
    read = [arg for arg in args if isinstance(arg, torch.Tensor)]
    is_open = len({arg.stride() for arg in read}) > 1 and not any(isinstance(a, list) for a in args)
    is_spread = is_open and all(_is_spread(arg, made) for arg in read)
    if not is_spread and func not in _BATCH_NORMS:
        return made
    with _disable_current_modes():
        few = [_few(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
        try:
            found = func(*few)
            lain = (found[0] if isinstance(found, tuple) else found).stride()
        except (
            RuntimeError,
            IndexError,
        ):  # of a kernel that the CPU has not, or of so few elements
            return made
    order = sorted(range(made.dim()), key=lambda dim: (-lain[dim], dim))
    long = [made.stride(dim) for dim in order if made.shape[dim] > 1]
    if long == sorted(long, reverse=True):
        return made
    strides, step = [0] * made.dim(), 1
    for dim in reversed(order):
        strides[dim], step = step, step * max(made.shape[dim], 1)
    return _fresh(made, strides)


def _is_spread(operand: torch.Tensor, made: torch.Tensor) -> bool:
    """Whether a tensor of numbers is broadcast to a result that has memory of its own."""
    sizes = zip(reversed(operand.shape), reversed(made.shape), strict=False)
    is_own = operand.untyped_storage()._cdata != made.untyped_storage()._cdata
    is_plain = operand.dtype is torch.bool or operand.is_floating_point()
    fits = operand.dim() <= made.dim() and all(size in (1, whole) for size, whole in sizes)
    return is_own and is_plain and fits


def _few(like: torch.Tensor) -> torch.Tensor:
    """At most two elements along each dim, on the CPU, in the order of another tensor's."""
    order = sorted(range(like.dim()), key=lambda dim: (-like.stride()[dim], dim))
    shape = [min(size, 2) for size in like.shape]
    dtype = torch.bool if like.dtype is torch.bool else torch.float32
    dense = torch.ones([shape[dim] if like.stride(dim) else 1 for dim in order], dtype=dtype)
    return dense.permute([order.index(dim) for dim in range(like.dim())]).expand(shape)


def _carries_gradient(placeholder: fx.Node) -> bool:
    kind, meta = placeholder.meta["kind"], placeholder.meta["tensor"]
    return bool(meta.requires_grad and kind in (Kind.PARAMETER, Kind.VALUE))


def _forward(
    graph: fx.Graph, values: dict[fx.Node, Any], recorder: _Recorder
) -> Sequence[torch.Tensor]:
    for node in graph.nodes:
        if node.op == "placeholder":
            continue
        args: Any = fx.map_arg(node.args, values.__getitem__)
        if node.op == "output":
            outputs: tuple[torch.Tensor, ...] = args[0]
            return outputs
        kwargs: Any = fx.map_arg(node.kwargs, values.__getitem__)
        function: Any = node.target
        recorder.origin = node.name
        values[node] = function(*args, **kwargs)
    raise AssertionError("a graph without an output")
