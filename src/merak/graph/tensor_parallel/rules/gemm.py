"""Sharding rules of matrix products and attention, by labels of their operands' dims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from merak.graph.ir.contractions import Operand, contraction, matmul_labels
from merak.graph.ir.operators import room_for_documents
from merak.graph.tensor_parallel.placement import (
    PARTIAL,
    REPLICATE,
    REPLICATE_PARTIAL_GRAD,
    Decision,
    Operator,
    Placement,
    Shard,
    shape_of,
)
from merak.graph.tensor_parallel.rules import experts
from merak.ops.sharded_dropout import attend_sharded

aten = torch.ops.aten


def contract(op: Operator, operands: Sequence[Operand], result: Sequence[str | None]) -> Decision:
    """Contraction, as einsum has it: dims of one label are sharded together.

    Args:
        op: the operator.
        operands: its tensors with a label for every dim; None for dims of size 1 that broadcast.
        result: the labels of its result; labels not there are summed over.

    Returns:
        The label that stays split decides: split results where it is among `result`, a partial sum
        where it is summed over. Whole operands with that label are sliced.
    """
    of_each = dict(operands)
    sharded = {node: placed for node, placed in op.sharded().items() if node in of_each}
    split = {node: (of_each[node][placed.dim], placed) for node, placed in sharded.items()}
    label, lead = _leading_split(op, split, result)
    needs: dict[fx.Node, Placement] = {}
    for node, labels in operands:
        if node in split and split[node][0] != label:
            needs[node] = REPLICATE_PARTIAL_GRAD
        elif label in labels:
            needs[node] = Shard(labels.index(label), lead.parts, lead.origin)
        else:
            needs[node] = REPLICATE_PARTIAL_GRAD
    if label not in result:
        return Decision(PARTIAL, needs)
    return Decision(Shard(list(result).index(label), lead.parts, lead.origin), needs)


def _leading_split(
    op: Operator,
    split: dict[fx.Node, tuple[str | None, Shard]],
    result: Sequence[str | None],
) -> tuple[str | None, Shard]:
    """Label that stays sharded; one that is summed over gives way to one in the result."""
    labels = {label for label, _ in split.values()}
    kept = labels if len(labels) == 1 else labels & set(result)
    if len(kept) != 1:
        raise op.error("multiplies operands that are split along different dims")
    (label,) = kept
    placed = [p for found, p in split.values() if found == label]
    if any(p.parts != placed[0].parts for p in placed):
        ways = " and ".join(str(p.parts) for p in placed)
        raise op.error(f"multiplies operands whose fused parts differ: {ways}")
    return label, placed[0]


def product(op: Operator) -> Decision:
    """linear, addmm, matmul, baddbmm, einsum, …: by the labels of their operands' dims."""
    found = contraction(op.node)
    if found is None:
        raise op.error(f"computes {op.node.args[0]!r}, which takes a diagonal")
    decision = contract(op, found.operands, found.result)
    return decision if found.summand is None else _with_bias(op, decision, found.summand[0])


def _with_bias(op: Operator, decision: Decision, bias: fx.Node) -> Decision:
    """Partial sum to which every rank adds its summand of the replicated bias."""
    if decision.output != PARTIAL:
        return decision
    if isinstance(op.placement(bias), Shard):
        raise op.error("adds a split bias to a sum over the ranks")
    return replace(decision, needs={**decision.needs, bias: PARTIAL})


def solve_triangular(op: Operator) -> Decision:
    """linalg_solve_triangular: stacks of equations, and each one's right-hand sides, are apart."""
    matrix, sides = op.arg("self"), op.arg("B")
    of_matrix, of_sides, result = matmul_labels(shape_of(matrix), shape_of(sides))
    labels = (*of_sides[:-2], *(("in", "out") if op.arg("left", True) else ("out", "in")))
    operands: list[Operand] = [(matrix, (*of_matrix[:-2], "in", "in")), (sides, labels)]
    for node, each in operands:
        if isinstance(placed := op.placement(node), Shard) and each[placed.dim] == "in":
            raise op.error("solves equations of which the unknowns are split")
    return contract(op, operands, (*result[:-2], *labels[-2:]))


def grouped(op: Operator) -> Decision:
    """_grouped_mm: rows in groups, each with its own weight of (groups, inputs, outputs)."""
    args: Any = op.node.args
    x, weight, *rest = args
    if (len(shape_of(x)), len(shape_of(weight))) != (2, 3) or any(rest[1:]):
        raise op.error("multiplies groups in another form than rows by a stack of weights")
    if isinstance(of_weight := op.placement(weight), Shard) and of_weight.dim == 0:
        return experts.grouped(op)
    return _of_whole_rows(op, x)


def _of_whole_rows(op: Operator, x: fx.Node) -> Decision:
    if isinstance(of_x := op.placement(x), Shard) and of_x.dim == 0:
        raise op.error("multiplies groups of rows that are split")
    return product(op)


def separate(op: Operator) -> Decision:
    """grouped_linear: rows in groups, each with its own weight of a list."""
    x, weights = op.arg("rows"), op.arg("weights")
    if experts.are_owned(op, weights):
        return experts.separate(op)
    return _of_whole_rows(op, x)


def convolution(op: Operator) -> Decision:
    """conv1d, conv2d, conv3d and their transposes, over whole pixels."""
    x, weight = op.arg("input"), op.arg("weight")
    of_x, of_weight, channels = op.placement(x), op.placement(weight), channels_dim(op)
    if op.arg("groups", 1) != 1 and not (isinstance(of_x, Shard) and of_x.dim < channels):
        return _grouped_convolution(op)
    lasts = (of_x, channels), (of_weight, 1)
    if any(isinstance(placed, Shard) and placed.dim > last for placed, last in lasts):
        raise op.error("convolves pixels that are split")
    return product(op)


def channels_dim(op: Operator) -> int:
    """Dim of a convolution's channels, before its pixels: the first one of a sample alone."""
    return len(shape_of(op.arg("input"))) - len(shape_of(op.arg("weight"))) + 1


def _grouped_convolution(op: Operator) -> Decision:
    """Convolution in groups of channels: every rank convolves its own groups.

    A group's outputs depend on its inputs alone, so that channels stay where they are.
    """
    x, weight, bias = op.arg("input"), op.arg("weight"), op.arg("bias")
    groups, dim = op.arg("groups", 1), channels_dim(op)
    sizes = shape_of(x)[dim], shape_of(weight)[0], shape_of(op.node)[dim]
    inputs, own, outputs = (size // groups for size in sizes)
    dims = {x: (dim, inputs), weight: (0, own)} | ({bias: (0, outputs)} if bias else {})
    lead = next(iter(op.sharded().values()))
    ways = set()
    for node, placed in op.sharded().items():
        own_dim, size = dims[node]
        if placed.dim != own_dim or any(n % size for n in placed.parts):
            raise op.error("convolves in groups, with operands that are split inside a group")
        ways.add(tuple(n // size for n in placed.parts))
    if len(ways) > 1:
        raise op.error("convolves in groups, with operands that are split differently")
    (parts,) = ways
    for number in parts:
        op.local(number)
    needs: dict[fx.Node, Placement] = {
        node: Shard(own_dim, tuple(n * size for n in parts), lead.origin)
        for node, (own_dim, size) in dims.items()
    }
    after = Shard(dim, tuple(n * outputs for n in parts), lead.origin)
    return Decision(after, needs, **op.replace(groups=op.local(groups)))


def attention(op: Operator) -> Decision:
    """scaled_dot_product_attention over sharded heads; grouped kv-heads and masks follow.

    Each of fewer kv-heads is on the ranks whose queries read it. Those that the ranks do not
    divide stay whole: every rank picks its queries' own.
    """
    query, key, value = op.arg("query"), op.arg("key"), op.arg("value")
    mask, grouped = op.arg("attn_mask"), bool(op.arg("enable_gqa", False))
    lead = _split_heads(op, query, (key, value))
    kv_whole = grouped and all(
        op.placement(n) == REPLICATE
        and shape_of(n)[lead.dim] * _ranks_per_head(op, shape_of(n)[lead.dim]) % op.degree
        for n in (key, value)
    )
    needs: dict[fx.Node, Placement] = {query: lead}
    for node in (key, value):
        size = shape_of(node)[lead.dim]
        copies = _ranks_per_head(op, size) if grouped else 1
        wanted = Shard(lead.dim, (size,) if grouped else lead.parts, lead.origin, copies=copies)
        if op.placement(node) not in (REPLICATE, wanted):
            raise op.error("attends over queries, keys and values that are split differently")
        one_for_all = size == 1 and not grouped and op.placement(node) == REPLICATE
        needs[node] = REPLICATE_PARTIAL_GRAD if kv_whole or one_for_all else wanted
        if not kv_whole and not one_for_all:
            op.local(size * copies)
    if mask is not None:
        needs[mask] = _mask_need(op, mask, len(shape_of(query)), lead)
    dropout_p = op.arg("dropout_p", 0.0)
    if not dropout_p and not kv_whole:
        return Decision(lead, needs)
    args = (query, key, value, mask, dropout_p, bool(op.arg("is_causal", False)))
    kwargs = {
        "scale": op.arg("scale"),
        "enable_gqa": grouped,
        "layout": op.layout(lead),
        "kv_whole": kv_whole,
        "rows": op.arg("rows"),
        "room": room_for_documents(op.node),
    }
    return Decision(lead, needs, attend_sharded, args, kwargs)


def _ranks_per_head(op: Operator, heads: int) -> int:
    """How many ranks each of some kv-heads is on: one, or several where there are more ranks."""
    is_few = isinstance(op.degree, int) and 1 < heads < op.degree and op.degree % heads == 0
    return int(op.degree) // heads if is_few else 1


def _split_heads(op: Operator, query: fx.Node, others: Sequence[fx.Node]) -> Shard:
    """Placement of the queries: as it is, or their heads sharded like the keys'."""
    split = [p for n in (query, *others) if isinstance(p := op.placement(n), Shard)]
    if not split or split[0].dim >= len(shape_of(query)) - 2:
        raise op.error("attends over heads that are whole, or split inside")
    if any(len(shape_of(n)) != len(shape_of(query)) for n in others):
        raise op.error("attends over split heads with queries or keys that are broadcast")
    lead, grouped = split[0], bool(op.arg("enable_gqa", False))
    if op.placement(query) == REPLICATE and grouped:
        return Shard(lead.dim, (shape_of(query)[lead.dim],), lead.origin)
    if grouped and len(lead.parts) > 1:
        raise op.error("attends over fused query heads that share kv-heads")
    return lead


def _mask_need(op: Operator, mask: fx.Node, num_dims: int, lead: Shard) -> Placement:
    shape = shape_of(mask)
    dim = lead.dim - (num_dims - len(shape))
    placed = op.placement(mask)
    if dim < 0 or shape[dim] == 1:
        if isinstance(placed, Shard):
            raise op.error("has a mask that is split, but not by heads")
        return REPLICATE_PARTIAL_GRAD
    wanted = Shard(dim, lead.parts, lead.origin)
    if isinstance(placed, Shard) and placed != wanted:
        raise op.error("has a mask that is split, but not by heads as the queries are")
    return wanted
