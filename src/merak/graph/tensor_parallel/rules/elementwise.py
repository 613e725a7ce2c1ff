"""Sharding rules of elementwise operators, and of those along a dim that is not sharded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import fx

from merak.graph.ir.mutation import has_mutable_schema
from merak.graph.ir.operators import FILLS_NEW, FILLS_SHAPE, NARROWS, draws, family, is_pointwise
from merak.graph.tensor_parallel.placement import (
    REPLICATE,
    Decision,
    Operator,
    Placement,
    Shard,
    is_opaque,
    is_padded,
    local_meta,
    positive,
    shape_of,
)
from merak.graph.tensor_parallel.rules import vocabulary
from merak.graph.tensor_parallel.rules.indexing import equally_sharded
from merak.graph.trace.modes.size_invariance import is_size_invariant
from merak.ops.sharded_dropout import dropout_sharded

aten = torch.ops.aten

_FILLS = FILLS_NEW | FILLS_SHAPE


def is_elementwise(target: Any) -> bool:
    """Whether torch tags an operator as pointwise, and it is no draw and has torch's backward."""
    return is_pointwise(target) and not draws(target) and not is_opaque(target)


def elementwise(op: Operator) -> Decision:
    """Elementwise operators with broadcasting: all operands are sharded alike or broadcast."""
    num_dims = max(len(shape_of(n)) for n in op.node.all_input_nodes)  # of each of its results
    split = op.sharded()
    aligned = {n: p.dim + num_dims - len(shape_of(n)) for n, p in split.items()}
    lead, placed = next(iter(split.items()))
    dim = aligned[lead]
    if any(aligned[n] != dim or p.parts != placed.parts for n, p in split.items()):
        raise op.error("combines operands that are split along different dims or fused parts")
    needs: dict[fx.Node, Placement] = {}
    for node in op.node.all_input_nodes:
        own = dim - (num_dims - len(shape_of(node)))
        if node not in split and own >= 0 and shape_of(node)[own] != 1:
            needs[node] = Shard(own, placed.parts, placed.origin)
    written = op.node.args[0] if has_mutable_schema(op.node) else None
    if isinstance(written, fx.Node) and written not in split:
        raise op.error("writes split values into a whole one")
    return Decision(Shard(dim, placed.parts, placed.origin), needs)


def first_operand(op: Operator) -> Decision:
    """Conversions and copies: the result has the first operand's placement."""
    placed = op.placement(op.node.args[0])
    if isinstance(placed, Shard):
        return Decision(placed)
    return Decision(REPLICATE)


def shape_given(op: Operator) -> Decision:
    """new_zeros and the like: of the operand they only take dtype and device."""
    return Decision(REPLICATE)


def along_dim(op: Operator) -> Decision:
    """softmax, cumsum, …: the dims they run along must not be sharded."""
    (operand, placed), *_ = op.sharded().items()
    given = op.arg("dim", -1)
    dims = given if isinstance(given, (list, tuple)) else [given]
    if placed.dim in {positive(dim, len(shape_of(operand))) for dim in dims}:
        if family(op.node.target) == "log_softmax":
            return vocabulary.log_softmax(op)
        raise op.error(f"runs along dim {placed.dim}, which is split")
    return Decision(placed)


def last_two_dims(op: Operator) -> Decision:
    """tril, triu: the last two dims must not be sharded."""
    (operand, placed), *_ = op.sharded().items()
    if placed.dim >= len(shape_of(operand)) - 2:
        raise op.error(f"looks at positions along dim {placed.dim}, which is split")
    return Decision(placed)


def dropout(op: Operator) -> Decision:
    """dropout: the rank's slice of the full mask."""
    (operand, placed), *_ = op.sharded().items()
    p, train, rows = op.arg("p"), op.arg("train"), op.arg("rows")
    if not train or p == 0:
        return Decision(placed)
    args = (operand, p, train, op.layout(placed))
    return Decision(placed, target=dropout_sharded, args=args, kwargs={"rows": rows})


def custom(op: Operator) -> Decision:
    """autograd_function: where forward and backward do to a shard what they do to the whole."""
    args: Any = op.node.args
    tensors, function, arguments = args
    operand, lead = next(iter(op.sharded().items()))
    local = local_meta(operand.meta["tensor"], lead, op.degree).shape
    metas = [n.meta["tensor"] for n in tensors]
    if not is_size_invariant(metas, local, function, arguments):
        raise op.error("calls a function with a backward of its own, which must see the whole")
    results = op.node.meta["tensor"]
    return replace(equally_sharded(op, tensors, lead, lead), output=(lead,) * len(results))


def as_written(op: Operator) -> Decision | None:
    """A new tensor that is placed like what is written into it; None where that is whole.

    A tensor that is filled slice by slice, as of keys with a rotary part, holds nothing before: it
    may lie as its slices need it.
    """
    if family(op.node.target) not in _FILLS:
        return None
    placed = set(_written(op))
    if len(placed) != 1:
        return None
    (lead,) = placed
    sizes = list(shape_of(op.node))
    if sum(lead.parts) != sizes[lead.dim] or is_padded(lead, op.degree):
        return None
    sizes[lead.dim] = op.local(sizes[lead.dim])
    return Decision(lead, **op.replace(size=sizes))


def _written(op: Operator) -> Iterator[Shard]:
    """Placements of the split values that are copied into a new tensor or into slices of it."""
    for view in (op.node, *(n for n in op.node.users if family(n.target) in NARROWS)):
        for writer in view.users:
            if family(writer.target) == "copy_" and writer.args[0] is view:
                placed = op.placements.get(cast(fx.Node, writer.args[1]))
                same_shape = shape_of(writer.args[1]) == shape_of(view)
                if isinstance(placed, Shard) and same_shape:
                    yield Shard(placed.dim, placed.parts)
