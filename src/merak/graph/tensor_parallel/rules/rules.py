"""Sharding rules of ATen operators, one for each family."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from merak.graph.ir.mutation import is_mutating, mutated_arguments
from merak.graph.ir.operators import (
    ATTENTIONS,
    CLASS_LOSSES,
    CONCATENATIONS,
    CONVERSIONS,
    CONVOLUTIONS,
    COPIES,
    CUMULATIVE,
    DENSE_GEMMS,
    EXPANDS,
    FILLS_LIKE,
    FILLS_NEW,
    GROUPED_GEMMS,
    MIRRORS,
    NARROWS,
    NORMS,
    PADS,
    POOLS,
    REDUCTIONS,
    RESHAPES,
    RESIZES,
    SEPARATE_GEMMS,
    SHAPED_LIKE,
    SOFTMAXES,
    SPLITS,
    TRANSPOSED_CONVOLUTIONS,
    TRANSPOSES,
    family,
)
from merak.graph.tensor_parallel.placement import (
    REPLICATE,
    REPLICATE_PARTIAL_GRAD,
    Decision,
    ExpertRows,
    Operator,
    Partial,
    PartlySharded,
    Rule,
    Shard,
    is_opaque,
    is_sparse,
)
from merak.graph.tensor_parallel.rules import (
    elementwise,
    experts,
    gemm,
    indexing,
    loops,
    norms,
    partial_sums,
    views,
    vocabulary,
)
from merak.graph.tensor_parallel.rules.partly_sharded import decide_partly_sharded
from merak.graph.tensor_parallel.rules.shared_shards import decide_shared

aten = torch.ops.aten

_WHOLE = Decision(REPLICATE)


def decide(op: Operator) -> Decision:
    """Decision about one operator, by the rule of its family.

    Args:
        op: the operator and the placements of its operands.

    Returns:
        The decision; operators without split operands stay as they are.

    Raises:
        ShardError: no rule says how the operator works on operands that are split so.
    """
    operands = op.node.all_input_nodes
    if any(isinstance(p := op.placements[n], Shard) and p.copies > 1 for n in operands):
        return decide_shared(op, _decide)
    return _decide(op)


def _decide(op: Operator) -> Decision:
    """Decision about an operator whose operands' shards are each on one rank."""
    operands = op.node.all_input_nodes
    if (filled := elementwise.as_written(op)) is not None:
        return filled
    are_whole = all(op.placements[n] is REPLICATE for n in operands)
    if are_whole and not op.in_split_work and not is_mutating(op.node):
        return _WHOLE  # as nearly everywhere while one weight is followed
    if not are_whole and any(map(is_sparse, (op.node, *operands))):
        raise op.error("works on a sparse tensor, of which no rank can hold a slice")
    if family(op.node.target) == "getitem":
        return _getitem(op)
    if any(isinstance(op.raw(n), PartlySharded) for n in operands):
        return decide_partly_sharded(op)
    if any(isinstance(op.raw(n), ExpertRows) for n in operands):
        of_rows = experts.decide_rows(op)
        if of_rows is not None:
            return of_rows
    if any(isinstance(op.raw(n), (Partial, ExpertRows)) for n in operands):
        carried = partial_sums.carry(op)
        if carried is not None:
            return carried
    if not op.sharded():
        return _inside(op)
    if family(op.node.target) == "opaque_call":
        return loops.loop(op, decide)
    rule = _rule_of(op.node.target)
    if vocabulary.reads_padding(op):
        return vocabulary.decide_padded(op, rule)
    if rule is None:
        raise op.error("has no rule for operands that are split over the ranks")
    return rule(op)


def _rule_of(target: Any) -> Rule | None:
    """Rule of an operator on sharded operands: by name, or as one that torch tags as pointwise."""
    fallback = elementwise.elementwise if elementwise.is_elementwise(target) else None
    return RULES.get(family(target), fallback)


def _inside(op: Operator) -> Decision:
    """Decision about replicated operands; in sharded work the result's gradient is partial too."""
    if is_mutating(op.node):
        return _write(op)
    if is_opaque(op.node.target):
        return Decision(REPLICATE, dict.fromkeys(op.node.all_input_nodes, REPLICATE))
    copied = op.in_split_work or any(
        op.raw(n) == REPLICATE_PARTIAL_GRAD for n in op.node.all_input_nodes
    )
    return Decision(REPLICATE_PARTIAL_GRAD if copied else REPLICATE)


def _write(op: Operator) -> Decision:
    """Decision about a mutation of replicated values: one placement for all of a storage."""
    written = mutated_arguments(op.node)
    placed = {op.placements[n] for n in written}
    placed = placed.union(*(op.by_storage.get(n.meta.get("storage"), ()) for n in written))
    if placed == {REPLICATE_PARTIAL_GRAD} and not is_opaque(op.node.target):
        return Decision(REPLICATE_PARTIAL_GRAD)
    if REPLICATE_PARTIAL_GRAD in placed:
        raise op.error("writes into a value that has two placements")
    return Decision(REPLICATE)


def _getitem(op: Operator) -> Decision:
    source, index = op.node.args
    assert isinstance(source, fx.Node) and isinstance(index, int)
    placed = op.placements[source]
    return Decision(placed[index] if isinstance(placed, tuple) else placed)


_FAMILIES: dict[Rule, Collection[str]] = {
    gemm.product: DENSE_GEMMS | {"einsum"},
    gemm.solve_triangular: ("linalg_solve_triangular",),
    gemm.grouped: GROUPED_GEMMS,
    gemm.separate: SEPARATE_GEMMS,
    indexing.grouped_values: ("grouped_values",),
    gemm.convolution: CONVOLUTIONS | TRANSPOSED_CONVOLUTIONS,
    vocabulary.embedding: ("embedding", "vocab_parallel_embedding"),
    vocabulary.loss: CLASS_LOSSES,
    gemm.attention: ATTENTIONS,
    views.view: RESHAPES | SHAPED_LIKE,
    views.transpose: TRANSPOSES | {"unsqueeze"},
    views.pairs: ("view_as_complex", "view_as_real"),
    views.move_along: ("flip", "roll"),
    views.squeeze: ("squeeze",),
    views.expand: EXPANDS,
    views.repeat: ("repeat",),
    views.repeat_interleave: ("repeat_interleave",),
    # pointwise too, but not tagged so
    elementwise.elementwise: COPIES
    | FILLS_LIKE
    | {"copy_", "detach", "fill_", "hardswish", "masked_fill", "masked_fill_", "where", "zero_"},
    elementwise.first_operand: CONVERSIONS | {"type_as"},
    elementwise.shape_given: FILLS_NEW,
    elementwise.along_dim: SOFTMAXES | CUMULATIVE | {"glu"},
    indexing.gather: ("gather",),
    indexing.index_select: ("index_select",),
    indexing.index: ("index",),
    elementwise.last_two_dims: ("tril", "triu"),
    norms.normalize: NORMS,
    norms.batch_norm: ("batch_norm", "instance_norm"),
    norms.group_norm: ("group_norm",),
    norms.each_channel: POOLS | RESIZES | MIRRORS,
    norms.weight_norm: ("_weight_norm",),
    norms.reduce: REDUCTIONS | {"argmax", "argmin"},
    # Of the dropouts, those whose pattern is known for a slice of the operand.
    elementwise.dropout: ("dropout", "dropout_sharded"),
    indexing.split: SPLITS,
    indexing.narrow: NARROWS,
    indexing.select: ("select",),
    indexing.pad: PADS,
    indexing.concatenate: CONCATENATIONS,
    indexing.stack: ("stack",),
    elementwise.custom: ("autograd_function",),
}

RULES: dict[str, Rule] = {name: rule for rule, names in _FAMILIES.items() for name in names}
"""Operator families to rules; what torch tags as pointwise needs no entry."""
