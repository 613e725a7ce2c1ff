"""Sharding rules of operators that index, cut, pad or join the dims of their operands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from merak.graph.ir.operators import family
from merak.graph.tensor_parallel.placement import (
    REPLICATE,
    Decision,
    Operator,
    Shard,
    listed_parts,
    positive,
    shape_of,
)
from merak.graph.tensor_parallel.rules import experts, vocabulary

aten = torch.ops.aten


def gather(op: Operator) -> Decision:
    """gather: along the sharded dim by a replicated index; else the index is sharded alike."""
    operand, index = op.arg("self"), op.arg("index")
    lead = next(iter(op.sharded().values()))
    if positive(op.arg("dim"), len(shape_of(operand))) == lead.dim:
        return vocabulary.gather(op)
    sizes = {shape_of(n)[lead.dim] for n in (operand, index)}
    if len(sizes) > 1 or any(op.placement(n) not in (REPLICATE, lead) for n in (operand, index)):
        raise op.error("picks by an index that is not split like the values")
    return Decision(lead, {operand: lead, index: lead})


def index_select(op: Operator) -> Decision:
    """index_select: along a dim that is not sharded, by a replicated index."""
    operand = op.arg("self")
    placed = op.placement(operand)
    dim = positive(op.arg("dim"), len(shape_of(operand)))
    if not isinstance(placed, Shard) or dim == placed.dim:
        raise op.error(f"picks along dim {dim}, which is split, or by a split index")
    return Decision(placed)


def index(op: Operator) -> Decision:
    """index: by replicated index tensors, in neighbouring dims that are not sharded."""
    operand: Any = op.node.args[0]
    indices: Any = op.node.args[1]
    placed = op.placement(operand)
    found = [d for d, i in enumerate(indices) if i is not None]
    tensors = [indices[d] for d in found]
    if isinstance(placed, Shard) and found == [0] == [placed.dim]:
        return experts.pick(op)
    neighbours = found == list(range(found[0], found[0] + len(found)))
    whole = all(op.placement(t) == REPLICATE for t in tensors)
    if not isinstance(placed, Shard) or placed.dim in found or not neighbours or not whole:
        raise op.error("picks elements along a dim that is split, or by a split index")
    if any(t.meta["tensor"].dtype == torch.bool for t in tensors):
        raise op.error("picks elements of a split value by a mask")
    grown = max(len(shape_of(t)) for t in tensors) - len(found)
    dim = placed.dim if placed.dim < found[0] else placed.dim + grown
    return Decision(Shard(dim, placed.parts, placed.origin))


def split(op: Operator) -> Decision:
    """split, split_with_sizes, chunk, unbind, …: along the sharded dim only between fused parts."""
    (operand, placed), *_ = op.sharded().items()
    results = op.node.meta["tensor"]
    dim = positive(op.arg("dim", 0), len(shape_of(operand)))
    if family(op.node.target) == "unbind":
        if dim == placed.dim:
            raise op.error(f"takes dim {dim} apart, which is split")
        after = Shard(placed.dim - (dim < placed.dim), placed.parts, placed.origin)
        return Decision((after,) * len(results))
    if dim != placed.dim:
        return Decision((placed,) * len(results))
    sizes = [result.shape[dim] for result in results]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    outputs = tuple(
        Shard(dim, _parts_between(op, placed, a, a + n), placed.origin)
        for a, n in zip(starts, sizes, strict=True)
    )
    args = (operand, [op.local(size) for size in sizes], dim)
    return Decision(outputs, target=aten.split_with_sizes.default, args=args, kwargs={})


def narrow(op: Operator) -> Decision:
    """slice, narrow: along the sharded dim only between fused parts."""
    (operand, placed), *_ = op.sharded().items()
    dim = positive(op.arg("dim", 0), len(shape_of(operand)))
    if dim != placed.dim:
        return Decision(placed)
    size = shape_of(operand)[dim]
    start, stop = extent(op, size)
    if (step := op.arg("step", 1)) != 1:
        return _every_few(op, operand, placed, (start, stop, step))
    parts = _parts_between(op, placed, start, stop)
    args = (operand, dim, op.local(start), op.local(stop, placed))
    after = Shard(dim, parts, placed.origin)
    return Decision(after, target=aten.slice.Tensor, args=args, kwargs={})


def _every_few(
    op: Operator, operand: fx.Node, placed: Shard, taken: tuple[int, int, int]
) -> Decision:
    """Every few elements of all of the sharded dim, as of gates and values side by side."""
    start, stop, step = taken
    size = shape_of(operand)[placed.dim]
    fits = isinstance(op.degree, int) and all(n % (step * op.degree) == 0 for n in placed.parts)
    if not fits or start >= step or stop != size:
        raise op.error(f"takes every {step}th element of a dim that is split")
    parts = tuple(n // step for n in placed.parts)
    args = (operand, placed.dim, start, op.local(size, placed), step)
    after = Shard(placed.dim, parts, placed.origin)
    return Decision(after, target=aten.slice.Tensor, args=args, kwargs={})


def extent(op: Operator, size: int) -> tuple[int, int]:
    """Start and stop of a slice or narrow of a dim of some size."""
    start, stop = op.arg("start") or 0, op.arg("end", size)
    if family(op.node.target) == "narrow":
        stop = positive(start, size) + op.arg("length")
    ends = (start, size if stop is None else stop)
    first, last = (max(0, min(positive(end, size), size)) for end in ends)
    return first, last


def _parts_between(op: Operator, placed: Shard, start: int, stop: int) -> tuple[int, ...]:
    """The fused parts from `start` to `stop`, which must be where parts begin or end."""
    edges = [sum(placed.parts[:i]) for i in range(len(placed.parts) + 1)]
    if start not in edges or stop not in edges:
        layer = placed.origin.rpartition(".")[0] or "the layer before it"
        raise op.error(
            f"takes {start} … {stop} of a dim split in parts of {listed_parts(placed)}",
            f"if {layer} is a fused layer, say Column(parts=…) with the relative sizes of what is "
            "fused; otherwise give it Replicate()",
        )
    return placed.parts[edges.index(start) : edges.index(stop)]


def select(op: Operator) -> Decision:
    """select.int: one index of a dim that is not sharded."""
    (operand, placed), *_ = op.sharded().items()
    dim = positive(op.arg("dim"), len(shape_of(operand)))
    if dim == placed.dim:
        raise op.error(f"takes one index of dim {dim}, which is split")
    return Decision(Shard(placed.dim - (dim < placed.dim), placed.parts, placed.origin))


def pad(op: Operator) -> Decision:
    """pad, constant_pad_nd: only dims that are not sharded."""
    (operand, placed), *_ = op.sharded().items()
    amounts: Sequence[int] = op.arg("pad")
    back = 2 * (len(shape_of(operand)) - 1 - placed.dim)
    if any(amounts[back : back + 2]):
        raise op.error(f"pads dim {placed.dim}, which is split")
    return Decision(placed)


def concatenate(op: Operator) -> Decision:
    """cat: along the sharded dim operands become fused parts; along others they are alike."""
    tensors: Any = op.node.args[0]
    num_dims = len(shape_of(op.node))
    dim = positive(op.arg("dim", 0), num_dims)
    lead = next(iter(op.sharded().values()))
    placed = [op.placement(t) for t in tensors]
    if dim != lead.dim:
        return equally_sharded(op, tensors, lead, lead)
    if not all(isinstance(p, Shard) and p.dim == dim for p in placed):
        raise op.error(f"joins split and whole operands along dim {dim}")
    parts = tuple(n for p in placed if isinstance(p, Shard) for n in p.parts)
    return Decision(Shard(dim, parts, lead.origin))


def grouped_values(op: Operator) -> Decision:
    """grouped_values: a value of each row's group, whose dims come behind that of the rows."""
    if experts.are_owned(op, op.arg("values")):
        return experts.separate(op)
    placed = {op.placement(value) for value in op.arg("values")} - {REPLICATE}
    if len(placed) > 1 or op.placement(op.arg("rows")) != REPLICATE:
        raise op.error("picks values that are split differently")
    (lead,) = placed
    assert isinstance(lead, Shard)
    return Decision(replace(lead, dim=lead.dim + 1), dict.fromkeys(op.arg("values"), lead))


def stack(op: Operator) -> Decision:
    """stack: a new dim before or after the sharded one."""
    dim = positive(op.arg("dim", 0), len(shape_of(op.node)))
    lead = next(iter(op.sharded().values()))
    after = Shard(lead.dim + (dim <= lead.dim), lead.parts, lead.origin)
    return equally_sharded(op, op.node.args[0], lead, after)


def equally_sharded(op: Operator, tensors: Any, lead: Shard, after: Shard) -> Decision:
    """Decision for operands that are all sharded alike; replicated ones are sliced.

    Args:
        op: the operator.
        tensors: its operands.
        lead: how sharded operands are sharded.
        after: placement of the result.
    """
    placed = [op.placement(t) for t in tensors]
    if any(isinstance(p, Shard) and p != lead for p in placed):
        raise op.error("joins operands that are split along different dims or fused parts")
    whole = [t for t, p in zip(tensors, placed, strict=True) if p == REPLICATE]
    return Decision(after, dict.fromkeys(whole, lead))
