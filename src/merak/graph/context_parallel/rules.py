"""Rules of context parallelism, in front of those of tensor parallelism.

Tokens meet in attention and in losses alone. Queries, keys and values become sharded over heads by
an all-to-all, and attention's result over tokens again; where the heads cannot be shared, keys and
values are gathered, and every rank attends with its own queries. A mean over tokens is a sum of
the ranks' summands, each divided by what counts of all tokens.

Source: DeepSpeed-Ulysses (arXiv 2309.14509, section 3); Llama 3 (arXiv 2407.21783, section 3.3.2,
gathered keys and values).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from merak.graph.ir.contractions import Operand, contraction
from merak.graph.ir.operators import CLASS_LOSSES, DENSE_GEMMS, NLL_LOSSES, family
from merak.graph.tensor_parallel.placement import (
    PARTIAL,
    REPLICATE,
    REPLICATE_PARTIAL_GRAD,
    Decision,
    Operator,
    Placement,
    Shard,
    positive,
    shape_of,
)
from merak.ops import collectives
from merak.ops.attention.ring import Ring, attend_ring
from merak.ops.context_parallel import (
    token_cross_entropy,
    token_nll,
    token_vocab_parallel_cross_entropy,
)
from merak.ops.linear import SENDS
from merak.ops.sharded_dropout import attend_sharded

COLLECTIVES = [f.__name__ for f in SENDS if f.__module__ == collectives.__name__]
"""Names of the functions that change what a tensor is on the ranks of another axis."""

_OF_CLASSES = (
    "vocab_parallel_argmax",
    "vocab_parallel_gather",
    "vocab_parallel_log_softmax",
    "vocab_parallel_logsumexp",
)
"""Functions of a rank's classes that compute each token by itself."""

Found = Decision | None
"""None where the rules of tensor parallelism are to decide."""


def attention(op: Operator) -> Found:
    """scaled_dot_product_attention over shards of the tokens."""
    query, key, value = op.arg("query"), op.arg("key"), op.arg("value")
    num_dims = len(shape_of(query))
    tokens = op.placement(query)
    if not isinstance(tokens, Shard) or tokens.dim != num_dims - 2:
        return None
    for dim in range(num_dims - 3, -1, -1):
        sizes = [shape_of(n)[dim] for n in (query, key, value)]
        if not any(size % op.degree for size in sizes):
            return _over_heads(op, dim, tokens)
    return _over_rows(op, tokens)


def _over_heads(op: Operator, dim: int, tokens: Shard) -> Decision:
    """Attention of all tokens over a rank's heads, or its samples."""
    query = op.arg("query")
    heads = Shard(dim, (shape_of(query)[dim],))
    needs: dict[fx.Node, Placement] = {
        n: Shard(dim, (shape_of(n)[dim],)) for n in (query, op.arg("key"), op.arg("value"))
    }
    mask, dropout_p = op.arg("attn_mask"), op.arg("dropout_p", 0.0)
    if mask is not None:
        needs[mask] = _along(mask, dim, len(shape_of(query)))
    if not dropout_p:
        return Decision(heads, needs, becomes=tokens)
    args = (query, op.arg("key"), op.arg("value"), mask, dropout_p, _is_causal(op))
    kwargs = {
        "scale": op.arg("scale"),
        "enable_gqa": bool(op.arg("enable_gqa", False)),
        "layout": op.layout(heads),
        "rows": op.arg("rows"),
    }
    return Decision(heads, needs, attend_sharded, args, kwargs, becomes=tokens)


def _over_rows(op: Operator, tokens: Shard) -> Decision:
    """Attention of a rank's queries over all keys, which pass around a ring or are gathered."""
    query, key, value = op.arg("query"), op.arg("key"), op.arg("value")
    mask, dropout_p = op.arg("attn_mask"), op.arg("dropout_p", 0.0)
    if dropout_p:
        raise op.error("drops attention weights of heads that cannot be shared out")
    passes = _fits_a_ring(op, tokens)
    needs: dict[fx.Node, Placement] = {
        n: op.placement(n) if passes else REPLICATE_PARTIAL_GRAD for n in (key, value)
    }
    needs[query] = tokens
    if mask is not None:
        needs[mask] = _along(mask, tokens.dim, len(shape_of(query)), tokens.parts)
    if passes:
        how = Ring(op.arg("scale"), _is_causal(op), int(op.degree), op.axis)
        return Decision(tokens, needs, attend_ring, (query, key, value, mask, *how), {})
    if _is_causal(op):
        raise op.error("has a causal mask over tokens that ranks do not share evenly")
    return Decision(tokens, needs)


def _fits_a_ring(op: Operator, tokens: Shard) -> bool:
    """Whether each rank has as many queries, and as many keys, of tokens in their order."""
    query, key, value = (op.arg(name) for name in ("query", "key", "value"))
    heads = [shape_of(n)[tokens.dim - 1] for n in (query, key, value)]
    if tokens.dim not in (1, 2) or heads[0] % heads[1] or heads[1] != heads[2]:
        return False
    placed = [op.placement(n) for n in (query, key, value)]
    sizes = [(shape_of(n)[tokens.dim],) for n in (query, key, value)]
    if any(p != Shard(tokens.dim, s) or s[0] % op.degree for p, s in zip(placed, sizes)):
        return False
    mask = op.arg("attn_mask")
    return mask is None or not mask.meta["tensor"].requires_grad


def _is_causal(op: Operator) -> bool:
    return bool(op.arg("is_causal", False))


def _along(
    node: fx.Node, dim: int, num_dims: int, parts: tuple[int, ...] | None = None
) -> Placement:
    """Shard of a value that broadcasts to `num_dims` dims; whole where its own dim has size 1."""
    own = dim - (num_dims - len(shape_of(node)))
    if own < 0 or shape_of(node)[own] == 1:
        return REPLICATE_PARTIAL_GRAD
    return Shard(own, parts or (shape_of(node)[own],))


def product(op: Operator) -> Found:
    """Product of two activations, as attention is written with: scores, and sums of values."""
    found = contraction(op.node)
    if found is None or len(found.factors) != 2:
        return None
    decision = _product(op, *found.factors, found.result)
    if decision is None or found.summand is None or not isinstance(decision.output, Shard):
        return decision
    (summand, _), placed = found.summand, decision.output
    need = _along(summand, placed.dim, len(found.result), placed.parts)
    return replace(decision, needs={**decision.needs, summand: need})


def _product(op: Operator, a: Operand, b: Operand, result: Sequence[str | None]) -> Found:
    """Product of two activations that are both sharded, by the labels of their dims."""
    placed_a, placed_b = op.placement(a[0]), op.placement(b[0])
    if not isinstance(placed_a, Shard) or not isinstance(placed_b, Shard):
        return None
    split_a, split_b = a[1][placed_a.dim], b[1][placed_b.dim]
    rows = [x for x in a[1] if x is not None and x in result and x not in b[1]]
    if split_a in rows and split_b not in a[1]:  # scores
        return _scores(op, a, b, result) or _rows(op, a, b, result)
    if split_a in rows:  # a rank's rows of the weights, and all values
        return _rows(op, a, b, result)
    if split_a in b[1] and split_a in result and split_b != split_a and rows:
        return _to_tokens(op, a, b, result)
    return None


def _scores(op: Operator, a: Operand, b: Operand, result: Sequence[str | None]) -> Found:
    """Scores of all tokens, of a rank's heads."""
    for label in reversed(result):
        if label is None or label not in a[1] or label not in b[1]:
            continue
        size = shape_of(a[0])[a[1].index(label)]
        if size % op.degree == 0:
            parts = (size,)
            needs: dict[fx.Node, Placement] = {
                n: Shard(labels.index(label), parts) for n, labels in (a, b)
            }
            return Decision(Shard(list(result).index(label), parts), needs)
    return None


def _rows(op: Operator, a: Operand, b: Operand, result: Sequence[str | None]) -> Decision:
    """A rank's rows of a product, by all of the other operand."""
    placed = op.placement(a[0])
    assert isinstance(placed, Shard)
    after = Shard(list(result).index(a[1][placed.dim]), placed.parts)
    return Decision(after, {a[0]: placed, b[0]: REPLICATE_PARTIAL_GRAD})


def _to_tokens(op: Operator, a: Operand, b: Operand, result: Sequence[str | None]) -> Found:
    """Values of a rank's heads, summed with its weights; then sharded over the rows again."""
    placed = op.placement(a[0])
    assert isinstance(placed, Shard)
    label = a[1][placed.dim]
    row = next(x for x in reversed(a[1]) if x is not None and x in result and x not in b[1])
    size = shape_of(a[0])[a[1].index(row)]
    if size % op.degree:
        return None
    needs: dict[fx.Node, Placement] = {
        a[0]: placed,
        b[0]: Shard(b[1].index(label), placed.parts),
    }
    tokens = Shard(list(result).index(row), (size,))
    return Decision(Shard(list(result).index(label), placed.parts), needs, becomes=tokens)


def loss(op: Operator) -> Found:
    """cross_entropy_loss, nll_loss, vocab_parallel_cross_entropy of a rank's tokens."""
    scores, target, weight = op.arg("self", op.arg("logits")), op.arg("target"), op.arg("weight")
    needs = _loss_needs(op, scores, target, weight)
    if needs is None:
        return None
    if (reduction := op.arg("reduction", 1)) != 1:
        return _unreduced(op, needs, reduction, target)
    args: tuple[Any, ...] = (scores, target, weight, op.arg("ignore_index", -100))
    if family(op.node.target) in NLL_LOSSES:
        return Decision(PARTIAL, needs, token_nll, (*args, op.axis), {})
    args = (*args, op.arg("label_smoothing", 0.0))
    if (layout := op.arg("layout")) is None:
        return Decision(PARTIAL, needs, token_cross_entropy, (*args, op.axis), {})
    return Decision(
        PARTIAL, needs, token_vocab_parallel_cross_entropy, (*args, layout, op.axis), {}
    )


def _loss_needs(
    op: Operator, scores: fx.Node, target: fx.Node, weight: fx.Node | None
) -> dict[fx.Node, Placement] | None:
    """Placements of the operands of a loss over shards of the tokens; None for other shards."""
    placed = op.placement(scores)
    num_dims = len(shape_of(scores))
    classes = min(1, num_dims - 1)
    if not isinstance(placed, Shard) or placed.dim == classes:
        return None
    is_dense = target.meta["tensor"].dtype.is_floating_point and len(shape_of(target)) == num_dims
    dim = placed.dim if is_dense else placed.dim - (placed.dim > classes)
    needs: dict[fx.Node, Placement] = {scores: placed, target: Shard(dim, placed.parts)}
    return needs | ({weight: REPLICATE} if weight is not None else {})


def _unreduced(
    op: Operator, needs: Mapping[fx.Node, Placement], reduction: int, target: fx.Node
) -> Decision:
    """A loss of each token, or their sum."""
    each = needs[target]
    assert isinstance(each, Shard)
    if reduction == 2:
        return Decision(PARTIAL, needs)
    if shape_of(op.node) != shape_of(target):
        raise op.error("gives losses in another shape than its targets")
    return Decision(each, needs)


def index(op: Operator) -> Found:
    """index of a whole value by a rank's numbers, as of experts' weights by their tokens."""
    args: Any = op.node.args
    operand, indices = args[:2]
    given = [i for i, n in enumerate(indices) if n is not None]
    if len(given) != 1 or op.placement(operand) != REPLICATE:
        return None
    by = op.placement(indices[given[0]])
    if not isinstance(by, Shard):
        return None
    return Decision(Shard(given[0] + by.dim, by.parts), {operand: REPLICATE_PARTIAL_GRAD})


def scatter(op: Operator) -> Found:
    """scatter along another dim than the tokens'."""
    operand, index, source = op.arg("self"), op.arg("index"), op.arg("src")
    placed = op.placement(operand)
    nodes = [n for n in (operand, index, source) if isinstance(n, fx.Node)]
    if (
        not isinstance(placed, Shard)
        or positive(op.arg("dim"), len(shape_of(operand))) == placed.dim
    ):
        return None
    if len({shape_of(n)[placed.dim] for n in nodes}) > 1:
        return None
    if any(op.placement(n) not in (REPLICATE, placed) for n in nodes):
        return None
    return Decision(placed, dict.fromkeys(nodes, placed))


def topk(op: Operator) -> Found:
    """topk, sort, argsort, …: of each token by itself."""
    return _of_each_token(op, op.arg("dim", -1))


def of_classes(op: Operator) -> Found:
    """Numbers of each token, of classes that other ranks share."""
    operand, over = op.node.args[0], op.arg("layout")[0]
    placed = op.placement(operand)
    if not isinstance(placed, Shard) or over == placed.dim:
        return None
    is_left_out = len(shape_of(op.node)) < len(shape_of(operand))
    dim = placed.dim - (is_left_out and over < placed.dim)
    others = {n for n in op.node.all_input_nodes if n is not operand}
    return Decision(Shard(dim, placed.parts), dict.fromkeys(others, placed))


def one_hot(op: Operator) -> Found:
    """one_hot: a new last dim."""
    placed = op.placement(op.node.args[0])
    return Decision(placed) if isinstance(placed, Shard) else None


def _of_each_token(op: Operator, dim: Any) -> Found:
    operand = op.node.args[0]
    placed = op.placement(operand)
    if not isinstance(placed, Shard) or not isinstance(dim, int):
        return None
    if positive(dim, len(shape_of(operand))) == placed.dim:
        return None
    results = op.node.meta["tensor"]
    return Decision((placed,) * len(results) if isinstance(results, tuple) else placed)


def collective(op: Operator) -> Found:
    """Collectives over another axis, along another dim than the tokens' or of every element."""
    placed = op.placement(op.node.args[0])
    if not isinstance(placed, Shard) or op.arg("dim") == placed.dim:
        return None
    return Decision(placed)


RULES: Mapping[str, Callable[[Operator], Found]] = {
    "scaled_dot_product_attention": attention,
    **dict.fromkeys(DENSE_GEMMS | {"einsum"}, product),
    **dict.fromkeys(CLASS_LOSSES | {"vocab_parallel_cross_entropy"}, loss),
    **dict.fromkeys(("topk", "sort", "argsort"), topk),
    "one_hot": one_hot,
    **dict.fromkeys(_OF_CLASSES, of_classes),
    "index": index,
    **dict.fromkeys(("scatter", "scatter_", "scatter_add", "scatter_add_"), scatter),
    **dict.fromkeys(COLLECTIVES, collective),
}
"""Families to the rules that decide before those of tensor parallelism."""
