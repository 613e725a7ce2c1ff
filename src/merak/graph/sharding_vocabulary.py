"""Look-ups in split tables, losses over split classes, and what vocabularies are padded with.

A vocabulary is split whether or not the degree divides it: shares are rounded up, and the last
ranks' are filled up with padding. Values there are never looked at and their gradients are zero, as
long as nothing runs along the split dim; so only operators pass that work on each class by itself
and have finite derivatives, and what ends the split must know of the padding.
"""

from __future__ import annotations

import math

from torch import fx

from merak.core.vocabulary import cross_entropy_of_share, embedding_of_share
from merak.graph.sharding_placement import (
    AXIS,
    PARTIAL,
    REPLICATED,
    Decision,
    Operator,
    Placement,
    Rule,
    Sharded,
    family,
    is_padded,
    shape_of,
)


def reads_padding(op: Operator) -> bool:
    """Whether an operand is filled up with padding on some rank."""
    return any(is_padded(placed, op.degree) for placed in op.sharded().values())


def decide_padded(op: Operator, rule: Rule | None) -> Decision:
    """What becomes of an operator on values with padding.

    Args:
        op: the operator.
        rule: its rule for split values; None if it has none.

    Raises:
        ShardError: padding would count in its result or in a gradient.
    """
    name = family(op.node.target).rstrip("_")
    if rule in (embedding, cross_entropy):
        return rule(op)
    if rule is None or name not in _EACH_BY_ITSELF:
        raise op.error("has no rule for a split dim that the ranks' number does not divide")
    if name == "div" and op.node.args[1] in op.sharded():
        raise op.error("divides by values that are padded")
    decision = rule(op)
    if not is_padded(decision.output, op.degree):
        raise op.error("sums over a dim that the ranks' number does not divide")
    return decision


_EACH_BY_ITSELF = frozenset(
    "linear addmm mm matmul view reshape _unsafe_view flatten unflatten transpose permute t "
    "numpy_T unsqueeze squeeze contiguous clone alias detach to _to_copy type_as slice narrow "
    "select add sub rsub mul div neg tanh sigmoid relu gelu silu clamp where masked_fill".split()
)
"""Operators with which padding stays apart: finite, and with finite derivatives."""


def embedding(op: Operator) -> Decision:
    """embedding of split rows: every rank's own, zeros for those of others, to be summed."""
    weight, indices = op.arg("weight"), op.arg("indices")
    placed = op.placement(weight)
    if not isinstance(placed, Sharded) or placed.dim != 0 or len(placed.parts) > 1:
        raise op.error("looks rows up in a table that is split otherwise than by rows")
    padding_idx, by_freq = op.arg("padding_idx", -1), op.arg("scale_grad_by_freq", False)
    args = (weight, indices, padding_idx, by_freq, op.arg("sparse", False), *placed.parts, AXIS)
    return Decision(PARTIAL, {indices: REPLICATED}, embedding_of_share, args, {})


def cross_entropy(op: Operator) -> Decision:
    """cross_entropy_loss over split classes: the ranks exchange a few numbers a position."""
    logits, target, weight = op.arg("self"), op.arg("target"), op.arg("weight")
    placed, classes = op.placement(logits), min(1, len(shape_of(logits)) - 1)
    if not isinstance(placed, Sharded) or placed.dim != classes or len(placed.parts) > 1:
        raise op.error("takes a loss of values that are split otherwise than by classes")
    if target.meta["tensor"].dtype.is_floating_point:
        raise op.error("takes a loss to probabilities of all classes")
    needs: dict[fx.Node, Placement] = {target: REPLICATED}
    needs |= {weight: REPLICATED} if weight is not None else {}
    smoothing = op.arg("label_smoothing", 0.0)
    reduction, ignored = op.arg("reduction", 1), op.arg("ignore_index", -100)
    layout = (placed.dim, *placed.parts, AXIS)
    args = (logits, target, weight, reduction, ignored, smoothing, layout)
    positions = math.prod(shape_of(target))
    sums = (positions, (3 if smoothing else 2) * positions)
    return Decision(REPLICATED, needs, cross_entropy_of_share, args, {}, sums=sums)
