"""Sharding rules of vocabularies: sharded tables, losses over sharded classes, and padding.

A vocabulary is sharded whether or not the degree divides it: shards are rounded up, and the last
ranks' are padded. Values of the padding are never read and their gradients are zero, as long as
nothing runs along the sharded dim; so only operators are allowed that work on each class by itself
and have finite derivatives, and an operator that runs along it must know of the padding.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from merak.graph.ir.operators import (
    CLASS_LOSSES,
    LINEARS,
    MATMULS,
    NARROWS,
    NLL_LOSSES,
    RESHAPES,
    SAME_VALUES,
    SQUEEZES,
    TRANSPOSES,
    family,
)
from merak.graph.tensor_parallel.placement import (
    PARTIAL,
    REPLICATE,
    REPLICATE_PARTIAL_GRAD,
    Decision,
    Operator,
    Placement,
    Rule,
    Shard,
    is_padded,
    positive,
    shape_of,
)
from merak.ops.vocab_parallel import vocab_parallel_cross_entropy, vocab_parallel_embedding
from merak.ops.vocab_parallel_reductions import (
    vocab_parallel_argmax,
    vocab_parallel_gather,
    vocab_parallel_log_softmax,
    vocab_parallel_logsumexp,
    vocab_parallel_nll,
    vocab_parallel_sum,
)

aten = torch.ops.aten


def reads_padding(op: Operator) -> bool:
    """Whether an operand has padding on some rank."""
    return any(is_padded(placed, op.degree) for placed in op.sharded().values())


def decide_padded(op: Operator, rule: Rule | None) -> Decision:
    """Decision about an operator on values with padding.

    Args:
        op: the operator.
        rule: its rule for split values; None if it has none.

    Raises:
        ShardError: padding would count in its result or in a gradient.
    """
    name = family(op.node.target).rstrip("_")
    if rule is not None and name in _ALONG_CLASSES and _runs_along_split(op):
        return rule(op)
    if rule is None or name not in _EACH_BY_ITSELF:
        raise op.error("has no rule for a split dim that the ranks' number does not divide")
    if name == "div" and op.node.args[1] in op.sharded():
        raise op.error("divides by values that are padded")
    decision = rule(op)
    if not is_padded(decision.output, op.degree):
        raise op.error("sums over a dim that the ranks' number does not divide")
    return decision


_ALONG_CLASSES = CLASS_LOSSES | frozenset(
    "argmax embedding log_softmax logsumexp gather sum mean".split()
)
"""Operators whose rules know of padding where they run along a vocabulary."""

_EACH_BY_ITSELF = (
    LINEARS
    | MATMULS
    | RESHAPES
    | TRANSPOSES
    | SQUEEZES
    | SAME_VALUES
    | NARROWS
    | frozenset("type_as select add sub rsub mul div neg clamp where masked_fill".split())
    | frozenset("tanh sigmoid relu gelu silu".split())
)
"""Operators with which padding stays apart: finite, and with finite derivatives."""


def _runs_along_split(op: Operator) -> bool:
    """Whether the sharded dim is among the dims that an operator runs along."""
    (operand, placed), *_ = op.sharded().items()
    dims: Any = op.arg("dim")
    if dims is None or dims == []:
        return True
    dims = dims if isinstance(dims, (list, tuple)) else [dims]
    return placed.dim in {positive(dim, len(shape_of(operand))) for dim in dims}


def _layout(op: Operator, operand: fx.Node, dim: int) -> tuple[int, int, str]:
    """Layout of the sharded classes along a dim of an operand."""
    placed = op.placement(operand)
    axis = op.ranks()
    if not isinstance(placed, Shard) or placed.dim != dim or len(placed.parts) > 1:
        raise op.error(f"runs along dim {dim} of values that are split otherwise")
    return dim, placed.parts[0], axis


def embedding(op: Operator) -> Decision:
    """embedding by a shard of the indices, or of sharded rows: zeros for those of other ranks."""
    weight, indices = op.arg("weight"), op.arg("indices")
    placed = op.placement(indices)
    if isinstance(placed, Shard) and op.placement(weight) == REPLICATE:
        if op.arg("scale_grad_by_freq", False):
            raise op.error("divides gradients by how often all indices look a row up")
        return Decision(placed, {weight: REPLICATE_PARTIAL_GRAD})
    _, size, axis = _layout(op, weight, 0)
    padding_idx, by_freq = op.arg("padding_idx", -1), op.arg("scale_grad_by_freq", False)
    args = (weight, indices, padding_idx, by_freq, op.arg("sparse", False), size, axis)
    return Decision(PARTIAL, {indices: REPLICATE}, vocab_parallel_embedding, args, {})


def loss(op: Operator) -> Decision:
    """cross_entropy_loss, nll_loss over sharded classes: no rank sees those of others."""
    scores, target, weight = op.arg("self"), op.arg("target"), op.arg("weight")
    layout = _layout(op, scores, min(1, len(shape_of(scores)) - 1))
    if target.meta["tensor"].dtype.is_floating_point:
        raise op.error("takes a loss to probabilities of all classes")
    needs: dict[fx.Node, Placement] = {n: REPLICATE for n in (target, weight) if n is not None}
    args = (scores, target, weight, op.arg("reduction", 1), op.arg("ignore_index", -100))
    if family(op.node.target) in NLL_LOSSES:
        return Decision(PARTIAL, needs, vocab_parallel_nll, (*args, layout), {})
    args_of_logits = (*args, op.arg("label_smoothing", 0.0), layout)
    return Decision(REPLICATE, needs, vocab_parallel_cross_entropy, args_of_logits, {})


def log_softmax(op: Operator) -> Decision:
    """log_softmax along the sharded dim: two all-reduces of a number a position."""
    operand = op.arg("self")
    layout = _layout(op, operand, positive(op.arg("dim"), len(shape_of(operand))))
    placed = op.placement(operand)
    args = (operand, op.arg("dtype"), layout)
    return Decision(placed, {}, vocab_parallel_log_softmax, args, {})


def logsumexp(op: Operator) -> Decision:
    """logsumexp along the sharded dim."""
    operand, dims = op.arg("self"), op.arg("dim")
    if len(dims) > 1:
        raise op.error("runs along several dims, of which one is split")
    layout = _layout(op, operand, positive(dims[0], len(shape_of(operand))))
    args = (operand, op.arg("keepdim", False), layout)
    return Decision(REPLICATE, {}, vocab_parallel_logsumexp, args, {})


def argmax(op: Operator) -> Decision:
    """argmax along the sharded dim: two all-reduces of a number a position."""
    operand, dim = op.arg("self"), op.arg("dim")
    if dim is None:
        raise op.error("looks for the largest of all values, which are split")
    layout = _layout(op, operand, positive(dim, len(shape_of(operand))))
    args = (operand, op.arg("keepdim", False), layout)
    return Decision(REPLICATE, {}, vocab_parallel_argmax, args, {})


def gather(op: Operator) -> Decision:
    """gather along the sharded dim, by a replicated index: a partial sum."""
    operand, index = op.arg("self"), op.arg("index")
    layout = _layout(op, operand, positive(op.arg("dim"), len(shape_of(operand))))
    if op.placement(index) != REPLICATE:
        raise op.error("picks by an index that is split")
    return Decision(
        PARTIAL, {index: REPLICATE}, vocab_parallel_gather, (operand, index, layout), {}
    )


def reduce_sum(op: Operator) -> Decision:
    """sum and mean over a dim with padding, and others."""
    (operand, placed), *_ = op.sharded().items()
    shape = shape_of(operand)
    given = op.arg("dim")
    given = [given] if isinstance(given, int) else given
    dims = [positive(d, len(shape)) for d in given or range(len(shape))]
    layout = _layout(op, operand, placed.dim)
    args = (operand, dims, bool(op.arg("keepdim", False)), op.arg("dtype"), layout)
    count = math.prod(shape[d] for d in dims)
    mean = family(op.node.target) == "mean"
    then = ((aten.div.Scalar, (count,)),) if mean else ()
    return Decision(PARTIAL, {}, vocab_parallel_sum, args, {}, then=then)
