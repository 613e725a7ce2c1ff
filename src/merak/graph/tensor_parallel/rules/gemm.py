"""Sharding rules of matrix products and attention, by labels of their operands' dims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from merak.graph.ir.einsum import einsum_labels
from merak.graph.ir.operators import TRANSPOSED_CONVOLUTIONS, family
from merak.graph.tensor_parallel.placement import (
    PARTIAL,
    REPLICATE,
    REPLICATE_PARTIAL_GRAD,
    Decision,
    Operand,
    Operator,
    Placement,
    Shard,
    shape_of,
)
from merak.graph.tensor_parallel.rules import experts
from merak.ops.sharded_dropout import attend_sharded

aten = torch.ops.aten

Labels = tuple[str | None, ...]


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
    split = {
        node: (labels[placed.dim], placed)
        for node, labels in operands
        if isinstance(placed := op.placement(node), Shard)
    }
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


def linear(op: Operator) -> Decision:
    """linear: the weight is (outputs, inputs)."""
    x, weight, bias = op.arg("input"), op.arg("weight"), op.arg("bias")
    rows: Labels = tuple(f"row{i}" for i in range(len(shape_of(x)) - 1))
    result = (*rows, "out")
    operands: list[Operand] = [
        (x, (*rows, "in")),
        (weight, ("out", "in")),
    ]
    if bias is None:
        return contract(op, operands, result)
    decision = contract(op, [*operands, (bias, ("out",)[: len(shape_of(bias))])], result)
    return _with_bias(op, decision, bias)


def addmm(op: Operator) -> Decision:
    """addmm: the weight is (inputs, outputs)."""
    bias, x, weight = op.arg("self"), op.arg("mat1"), op.arg("mat2")
    operands: list[Operand] = [
        (bias, _broadcast(bias, ("row", "out"))),
        (x, ("row", "in")),
        (weight, ("in", "out")),
    ]
    decision = contract(op, operands, ("row", "out"))
    return _with_bias(op, decision, bias)


def _with_bias(op: Operator, decision: Decision, bias: fx.Node) -> Decision:
    """Partial sum to which every rank adds its summand of the replicated bias."""
    if decision.output != PARTIAL:
        return decision
    if isinstance(op.placement(bias), Shard):
        raise op.error("adds a split bias to a sum over the ranks")
    return replace(decision, needs={**decision.needs, bias: PARTIAL})


def matmul(op: Operator) -> Decision:
    """matmul, mm, bmm: leading dims broadcast."""
    a, b = op.node.args[0], op.node.args[1]
    assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
    labels_a, labels_b, result = matmul_labels(shape_of(a), shape_of(b))
    return contract(op, [(a, labels_a), (b, labels_b)], result)


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
    operands: list[Operand] = [(x, ("row", "in")), (weight, ("group", "in", "out"))]
    if isinstance(of_weight := op.placement(weight), Shard) and of_weight.dim == 0:
        return experts.grouped(op)
    placed = [(labels, op.placement(n)) for n, labels in operands]
    if any(isinstance(p, Shard) and labels[p.dim] in ("row", "group") for labels, p in placed):
        raise op.error("multiplies groups of rows that are split")
    return contract(op, operands, ("row", "out"))


def separate(op: Operator) -> Decision:
    """grouped_linear: rows in groups, each with its own weight of a list."""
    x, weights = op.arg("rows"), op.arg("weights")
    if experts.are_owned(op, weights):
        return experts.separate(op)
    labels = ("out", "in") if op.arg("is_transposed") else ("in", "out")
    if isinstance(of_x := op.placement(x), Shard) and of_x.dim == 0:
        raise op.error("multiplies groups of rows that are split")
    operands: list[Operand] = [(x, ("row", "in")), *((weight, labels) for weight in weights)]
    return contract(op, operands, ("row", "out"))


def convolution(op: Operator) -> Decision:
    """conv1d, conv2d, conv3d over whole pixels: the weight is (outputs, inputs, …).

    That of their transposes, conv_transpose1d, …, is (inputs, outputs, …).
    """
    x, weight, bias = op.arg("input"), op.arg("weight"), op.arg("bias")
    of_x = op.placement(x)
    is_transposed = family(op.node.target) in TRANSPOSED_CONVOLUTIONS
    if op.arg("groups", 1) != 1 and not (isinstance(of_x, Shard) and of_x.dim == 0):
        return _grouped_convolution(op)
    pixels = tuple(f"pixel{i}" for i in range(len(shape_of(x)) - 2))
    kernel = tuple(f"kernel{i}" for i in range(len(pixels)))
    sides = ("in", "out") if is_transposed else ("out", "in")
    operands: list[Operand] = [(x, ("row", "in", *pixels)), (weight, (*sides, *kernel))]
    if any(p.dim > 1 for n in (x, weight) if isinstance(p := op.placement(n), Shard)):
        raise op.error("convolves pixels that are split")
    result = ("row", "out", *pixels)
    if bias is None:
        return contract(op, operands, result)
    return _with_bias(op, contract(op, [*operands, (bias, ("out",))], result), bias)


def _grouped_convolution(op: Operator) -> Decision:
    """Convolution in groups of channels: every rank convolves its own groups.

    A group's outputs depend on its inputs alone, so that channels stay where they are.
    """
    x, weight, bias = op.arg("input"), op.arg("weight"), op.arg("bias")
    groups = op.arg("groups", 1)
    inputs, own, outputs = (
        size // groups for size in (shape_of(x)[1], shape_of(weight)[0], shape_of(op.node)[1])
    )
    dims = {x: (1, inputs), weight: (0, own)} | ({bias: (0, outputs)} if bias else {})
    lead = next(iter(op.sharded().values()))
    ways = set()
    for node, placed in op.sharded().items():
        dim, size = dims[node]
        if placed.dim != dim or any(n % size for n in placed.parts):
            raise op.error("convolves in groups, with operands that are split inside a group")
        ways.add(tuple(n // size for n in placed.parts))
    if len(ways) > 1:
        raise op.error("convolves in groups, with operands that are split differently")
    (parts,) = ways
    for number in parts:
        op.local(number)
    needs: dict[fx.Node, Placement] = {
        node: Shard(dim, tuple(n * size for n in parts), lead.origin)
        for node, (dim, size) in dims.items()
    }
    after = Shard(1, tuple(n * outputs for n in parts), lead.origin)
    return Decision(after, needs, **op.replace(groups=op.local(groups)))


def baddbmm(op: Operator) -> Decision:
    """baddbmm: the summand is added to products that are split along the batch."""
    summand, a, b = op.arg("self"), op.arg("batch1"), op.arg("batch2")
    result = ("batch", "row", "out")
    operands: list[Operand] = [
        (summand, _broadcast(summand, result)),
        (a, ("batch", "row", "in")),
        (b, ("batch", "in", "out")),
    ]
    decision = contract(op, operands, result)
    if decision.output == PARTIAL:
        raise op.error("adds to products that are summed over a split dim")
    return decision


def einsum(op: Operator) -> Decision:
    """einsum of operands without diagonals."""
    tensors, labels = op.node.args[1], einsum_labels(op.node)
    assert isinstance(tensors, (list, tuple))
    if labels is None:
        raise op.error(f"computes {op.node.args[0]!r}, which takes a diagonal")
    terms, result = labels
    operands = [(n, _broadcast(n, term)) for n, term in zip(tensors, terms, strict=True)]
    return contract(op, operands, result)


def _broadcast(node: fx.Node, result: Sequence[str | None]) -> Labels:
    """The last labels of `result` for an operand; None for dims of size 1, which broadcast."""
    shape = shape_of(node)
    labels = tuple(result)[len(result) - len(shape) :]
    return tuple(None if size == 1 else label for size, label in zip(shape, labels, strict=True))


def matmul_labels(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[Labels, Labels, Labels]:
    """Labels of the dims of two matrices, or stacks of them, and of their product."""
    num_batch = max(len(a), len(b)) - 2
    names = [f"batch{i}" for i in range(max(num_batch, 0))]

    def batch(shape: tuple[int, ...]) -> Labels:
        lead = shape[:-2]
        found = names[len(names) - len(lead) :]
        return tuple(None if size == 1 else name for size, name in zip(lead, found, strict=True))

    labels_a = (*batch(a), "row", "in") if len(a) > 1 else ("in",)
    labels_b = (*batch(b), "in", "out") if len(b) > 1 else ("in",)
    result = (*names, *labels_a[-2:-1], *(labels_b[-1:] if len(b) > 1 else ()))
    return labels_a, labels_b, result


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
