"""Sharding rules of partly sharded fused weights: some parts split, others whole on all ranks.

A rank holds its shard of the split parts and all of the others, parts in their order. Such a value
goes through few operators before the graph takes its parts apart; others are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from merak.graph.ir.contractions import contraction
from merak.graph.ir.mutation import has_mutable_schema
from merak.graph.ir.operators import (
    CONVOLUTIONS,
    LINEARS,
    MATMULS,
    RESHAPES,
    SAME_VALUES,
    SPLITS,
    TRANSPOSES,
    family,
)
from merak.graph.tensor_parallel.placement import (
    REPLICATE_PARTIAL_GRAD,
    Decision,
    Degree,
    Operator,
    PartlySharded,
    Placement,
    Shard,
    positive,
    shape_of,
)
from merak.graph.tensor_parallel.rules import gemm, indexing, views
from merak.graph.tensor_parallel.rules.elementwise import is_elementwise

aten = torch.ops.aten


def decide_partly_sharded(op: Operator) -> Decision:
    """Decision about an operator that reads a partly sharded value.

    Raises:
        ShardError: it needs the value in one piece.
    """
    fallback = _elementwise if is_elementwise(op.node.target) else None
    rule = _RULES.get(family(op.node.target), fallback)
    if rule is None:
        raise op.error("has no rule for a fused value of which only some parts are split")
    return rule(op)


def local_size(placed: PartlySharded, degree: Degree) -> int:
    """Local size of a partly sharded dim."""
    sizes = enumerate(placed.parts)
    return sum(size if i in placed.whole else size // degree for i, size in sizes)


def _operand(op: Operator) -> tuple[fx.Node, PartlySharded]:
    for node in op.node.all_input_nodes:
        placed = op.raw(node)
        if isinstance(placed, PartlySharded):
            return node, placed
    raise AssertionError("the rule is for mixed operands")


def _as_split(op: Operator, placed: PartlySharded) -> Operator:
    """Operator as if one rank held all parts of its value."""
    node, _ = _operand(op)
    alone = {**op.placements, node: Shard(placed.dim, placed.parts, placed.origin)}
    return replace(op, placements=alone, degree=1)


def _same_parts(rule: Callable[[Operator], Decision]) -> Callable[[Operator], Decision]:
    """Rule that moves the dim and keeps its parts."""

    def moved(op: Operator) -> Decision:
        _, placed = _operand(op)
        output = rule(_as_split(op, placed)).output
        assert isinstance(output, Shard)
        return Decision(replace(placed, dim=output.dim))

    return moved


def _product(op: Operator) -> Decision:
    """linear, addmm, matmul, mm: the parts are outputs of the weight."""
    _, placed = _operand(op)
    alone = op
    for node in op.node.all_input_nodes:
        if isinstance(found := op.raw(node), PartlySharded):
            if (found.parts, found.whole) != (placed.parts, placed.whole):
                raise op.error("combines fused parts of different sizes")
            split = Shard(found.dim, found.parts, found.origin)
            alone = replace(alone, placements={**alone.placements, node: split})
    decision = gemm.product(replace(alone, degree=1))
    output = decision.output
    if not isinstance(output, Shard) or output.parts != placed.parts:
        raise op.error("sums over fused parts of which only some are split")
    needs: dict[fx.Node, Placement] = dict.fromkeys(op.node.all_input_nodes, REPLICATE_PARTIAL_GRAD)
    needs |= {n: p for n in needs if isinstance(p := op.raw(n), PartlySharded)}
    own = contraction(op.node)
    if own and own.summand and not isinstance(op.raw(bias := own.summand[0]), PartlySharded):
        needs[bias] = replace(placed, dim=0)
    return Decision(replace(placed, dim=output.dim), needs)


def _view(op: Operator) -> Decision:
    node, placed = _operand(op)
    new = shape_of(op.node)
    as_shard = Shard(placed.dim, placed.parts, placed.origin)
    after = views.reshaped(shape_of(node), new, as_shard, 1)
    if after is None or len(after.parts) % len(placed.parts):
        raise op.error("reshapes a fused value of which only some parts are split")
    times, count = len(after.parts) // len(placed.parts), len(placed.parts)
    whole = frozenset(i + count * k for i in placed.whole for k in range(times))
    output = PartlySharded(after.dim, after.parts, whole, placed.origin)
    _check_divisible(op, output)
    sizes = list(new)
    sizes[after.dim] = local_size(output, op.degree)
    return Decision(output, target=aten.reshape.default, args=(node, sizes), kwargs={})


def _check_divisible(op: Operator, placed: PartlySharded) -> None:
    split = [size for i, size in enumerate(placed.parts) if i not in placed.whole]
    for size in split:
        op.local(size)


def _between(
    op: Operator, placed: PartlySharded, start: int, stop: int
) -> tuple[Placement, int, int]:
    """Placement of the parts from `start` to `stop`, and their range on a rank."""
    edges = [sum(placed.parts[:i]) for i in range(len(placed.parts) + 1)]
    if start not in edges or stop not in edges or stop <= start:
        raise op.error(f"takes {start} … {stop} of fused parts of which only some are split")
    first, last = edges.index(start), edges.index(stop)
    own = [replace(placed, parts=placed.parts[:i], whole=placed.whole) for i in (first, last)]
    begin, end = (local_size(p, op.degree) for p in own)
    whole = frozenset(i - first for i in placed.whole if first <= i < last)
    parts = placed.parts[first:last]
    if not whole:
        return Shard(placed.dim, parts, placed.origin), begin, end
    if len(whole) == len(parts):
        return REPLICATE_PARTIAL_GRAD, begin, end
    return PartlySharded(placed.dim, parts, whole, placed.origin), begin, end


def _slice(op: Operator) -> Decision:
    node, placed = _operand(op)
    dim = positive(op.arg("dim", 0), len(shape_of(node)))
    if dim != placed.dim:
        return Decision(placed)
    size = shape_of(node)[dim]
    start, stop = indexing.extent(op, size)
    if op.arg("step", 1) != 1:
        raise op.error("takes every few elements of a dim that is split")
    output, begin, end = _between(op, placed, start, stop)
    args = (node, dim, begin, end)
    return Decision(output, target=aten.slice.Tensor, args=args, kwargs={})


def _split(op: Operator) -> Decision:
    node, placed = _operand(op)
    results = op.node.meta["tensor"]
    dim = positive(op.arg("dim", 0), len(shape_of(node)))
    if dim != placed.dim:
        return Decision((placed,) * len(results))
    sizes = [result.shape[dim] for result in results]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    found = [_between(op, placed, a, a + n) for a, n in zip(starts, sizes, strict=True)]
    args = (node, [end - begin for _, begin, end in found], dim)
    outputs = tuple(output for output, _, _ in found)
    return Decision(outputs, target=aten.split_with_sizes.default, args=args, kwargs={})


def _elementwise(op: Operator) -> Decision:
    """Operands are in the same parts, or broadcast along them."""
    node, placed = _operand(op)
    num_dims = len(shape_of(op.node))
    output = replace(placed, dim=placed.dim + num_dims - len(shape_of(node)))
    if has_mutable_schema(op.node):
        raise op.error("writes into a fused value of which only some parts are split")
    needs: dict[fx.Node, Placement] = {}
    for other in op.node.all_input_nodes:
        dim = output.dim - num_dims + len(shape_of(other))
        is_broadcast = dim < 0 or shape_of(other)[dim] == 1
        needs[other] = REPLICATE_PARTIAL_GRAD if is_broadcast else replace(placed, dim=dim)
    _check_needs(op, needs)
    return Decision(output, needs)


def _convolution(op: Operator) -> Decision:
    """Convolution in groups of channels, with whole groups in each part."""
    x, weight, bias = op.arg("input"), op.arg("weight"), op.arg("bias")
    groups, (node, placed) = op.arg("groups", 1), _operand(op)
    before = gemm.channels_dim(op)
    num_inputs, num_outputs = shape_of(x)[before], shape_of(weight)[0]
    channels = {x: (before, num_inputs // groups), weight: (0, num_outputs // groups)}
    channels |= {bias: channels[weight]} if bias is not None else {}
    dim, size = channels[node]
    if placed.dim != dim or any(part % size for part in placed.parts):
        raise op.error("convolves channels of a group of which only some are split")
    of_groups = replace(placed, parts=tuple(part // size for part in placed.parts))
    _check_divisible(op, of_groups)

    def in_channels(dim: int, size: int) -> PartlySharded:
        return replace(of_groups, dim=dim, parts=tuple(part * size for part in of_groups.parts))

    needs: dict[fx.Node, Placement] = {n: in_channels(*own) for n, own in channels.items()}
    _check_needs(op, needs)
    output = in_channels(before, channels[weight][1])
    return Decision(output, needs, **op.replace(groups=local_size(of_groups, op.degree)))


def _check_needs(op: Operator, needs: Mapping[fx.Node, Placement]) -> None:
    """Check that what is split is split as needed; what is whole can still become so."""
    for node, need in needs.items():
        if isinstance(placed := op.raw(node), (Shard, PartlySharded)) and placed != need:
            raise op.error("combines a fused value of which only some parts are split with others")


def _as_it_lies(op: Operator) -> Decision:
    return Decision(_operand(op)[1])


_FAMILIES: Sequence[tuple[Callable[[Operator], Decision], Collection[str]]] = (
    # The parts may be a dim of the batch in bmm: its other operand would need the same parts.
    (_product, LINEARS | MATMULS - {"bmm"}),
    (_same_parts(views.transpose), TRANSPOSES | {"unsqueeze"}),
    (_same_parts(views.squeeze), ("squeeze",)),
    (_view, RESHAPES),
    (_slice, ("slice",)),
    # One element of a dim is no fused part.
    (_split, SPLITS - {"unbind"}),
    (_convolution, CONVOLUTIONS),
    (_as_it_lies, SAME_VALUES),
)

_RULES = {name: rule for rule, names in _FAMILIES for name in names}
