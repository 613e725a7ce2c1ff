"""Clean-up of a joint graph: views of one place in memory are one node, and nothing idle runs.

Nothing is reordered, and nothing merged but views, so bits stay as they are.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from merak.graph.ir.mutation import has_mutable_schema
from merak.graph.ir.operators import draws, family
from merak.graph.joint.derive import JointError, JointGraph, Layout, number_at
from merak.ops.chunked_loss import chunk_gradients, scale_gradients
from merak.ops.chunked_rows import chunk_results_gradients
from merak.ops.linear import sent_by

aten = torch.ops.aten

_VIEWS = (aten.view.default, aten._unsafe_view.default)

_SAME: dict[Any, torch._ops.OpOverload] = {
    aten._unsafe_view.default: aten.view.default,
    aten.mul.Scalar: aten.mul.Tensor,
    aten.div.Scalar: aten.div.Tensor,
}
"""Operators in whose place another computes the same bits, whose call costs less."""


_FILLED: dict[Any, torch._ops.OpOverload] = {
    aten.new_empty.default: aten.empty.memory_format,
    aten.new_zeros.default: aten.zeros.default,
    aten.new_ones.default: aten.ones.default,
    aten.new_full.default: aten.full.default,
    aten.new_empty_strided.default: aten.empty_strided.default,
    aten.empty_like.default: aten.empty_strided.default,
    aten.zeros_like.default: aten.zeros.default,
    aten.ones_like.default: aten.ones.default,
    aten.full_like.default: aten.full.default,
}
"""What fills new memory as operators do that read of a tensor how it lies, and no element."""


def clean(joint: JointGraph) -> None:
    """Clean a joint graph, in place.

    Raises:
        JointError: nothing reads what an operator has got from other ranks.
    """
    _fill_by_sizes(joint.graph)
    _leave_unrounded(joint)
    seen: dict[Layout, fx.Node] = {}
    for node in joint.graph.nodes:
        layout = node.meta.get("layout")
        node.target = _SAME.get(node.target, node.target)
        if layout is None:
            continue
        if is_view(node):
            _shorten(node)
            _squeeze_sum(node, seen)
            known = seen.get(layout)
            if known is not None:
                node.replace_all_uses_with(known)
                continue
        seen.setdefault(layout, node)
    _replace_results(joint)
    for node in reversed(list(joint.graph.nodes)):
        if not node.users and node.op == "call_function" and not has_effect(node):
            joint.graph.erase_node(node)
    for node in joint.graph.nodes:
        if not node.users and node.op == "call_function" and sent_by(node.target).there:
            raise JointError(f"nothing reads what {node.target.__name__} gives")


def is_view(node: fx.Node) -> bool:
    """Whether a node yields memory of an argument, and writes nothing."""
    is_view = isinstance(node.target, torch._ops.OpOverload) and not has_mutable_schema(node)
    return is_view and node.meta["layout"] is not None and base_of(node) is not None


def base_of(node: fx.Node) -> fx.Node | None:
    """Argument whose memory a node yields; None if it has memory of its own."""
    storage = node.meta["layout"].storage
    for argument in node.all_input_nodes:
        layout = argument.meta["layout"]
        if layout is not None and layout.storage == storage:
            return argument
    return None


def has_effect(node: fx.Node) -> bool:
    """Whether an operator must run whoever reads its results: it writes, draws, sends or checks."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target is not operator.getitem
    schema = node.target._schema
    return schema.is_mutable or not schema.returns or draws(node.target)


def _leave_unrounded(joint: JointGraph) -> None:
    """Give gradients of weights that are summed over chunks as they are; autograd rounds them."""
    for call in joint.graph.nodes:
        if family(call.target) not in _UNROUNDED:
            continue
        for gradient in call.users:
            for rounded in list(gradient.users):
                if rounded.target is aten._to_copy.default:
                    rounded.replace_all_uses_with(gradient, lambda user: user.op == "output")


_UNROUNDED = [f.__name__ for f in (chunk_gradients, scale_gradients, chunk_results_gradients)]
"""Functions that give such gradients."""


def _fill_by_sizes(graph: fx.Graph) -> None:
    """Let what fills new memory say its sizes; what was got from other ranks for them goes."""
    nodes = list(graph.nodes)
    is_sized = all(node.target is not number_at for node in nodes)
    read = {node for node in nodes if node.users}
    for node in nodes:
        if node.target in _FILLED and node.meta.get("layout") is not None:
            _read_no_tensor(node, is_sized)
    for node in reversed(nodes):
        is_idle = node in read and not node.users and node.op == "call_function"
        if is_idle and (not has_effect(node) or sent_by(node.target).there):
            graph.erase_node(node)


def _read_no_tensor(node: fx.Node, is_sized: bool) -> None:
    """Let an operator that fills new memory say its sizes, and not read a tensor for them.

    Else what is laid out like a tensor, such as the mask of a dropout, would be a reason to save or
    recompute that tensor.

    Args:
        node: the operator.
        is_sized: whether no size of the graph follows from values.
    """
    layout, filled = node.meta["layout"], _FILLED[node.target]
    says_sizes = node.target._schema.name.startswith("aten::new_")  # type: ignore[union-attr]
    args: tuple[Any, ...]
    if says_sizes:
        args = node.args[1:]
    elif filled is aten.empty_strided.default and is_sized:
        args = (layout.shape, layout.stride)
    elif is_sized and is_contiguous(layout):
        args = (layout.shape, *node.args[1:])
    else:
        return
    node.target, node.args = filled, args
    node.kwargs = {"dtype": layout.dtype, "device": layout.device}


def _shorten(node: fx.Node) -> None:
    """Let a view of a view be one of the whole."""
    base = node.args[0] if node.target in _VIEWS else None
    if isinstance(base, fx.Node) and base.target in _VIEWS:
        whole = base.args[0]
        assert isinstance(whole, fx.Node)
        if is_contiguous(whole.meta["layout"]):
            node.replace_input_with(base, whole)


def _squeeze_sum(view: fx.Node, seen: dict[Layout, fx.Node]) -> None:
    """Let a sum that a view takes the summed dims off have none of them, in place of the view."""
    total = view.args[0]
    if view.target not in _VIEWS or not isinstance(total, fx.Node):
        return
    if total.target is not aten.sum.dim_IntList or total.args[2:] != (True,):
        return
    whole, dims, _ = total.args
    kept, layout = total.meta["layout"], view.meta["layout"]
    places = {int(dim) % len(kept.shape) for dim in dims}  # type: ignore[arg-type, union-attr]
    shape = tuple(size for place, size in enumerate(kept.shape) if place not in places)
    if places and list(total.users) == [view] and shape == layout.shape:
        total.args = (whole, dims)
        total.meta["layout"] = layout
        del seen[kept]
        seen[layout] = total


def is_contiguous(layout: Layout) -> bool:
    """Whether a tensor is contiguous."""
    expected = 1
    for size, stride in zip(reversed(layout.shape), reversed(layout.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _replace_results(joint: JointGraph) -> None:
    results: Any = joint.graph.output_node().args[0]
    joint.outputs[:] = results[0]
    joint.gradients.update(zip(joint.gradients, results[1], strict=True))
