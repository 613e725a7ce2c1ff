"""Sharding rules of partial sums: they travel through operators that are linear in them.

What a linear operator gives for a sum is the sum of what it gives for the summands, so the ranks'
summands need not be summed before it. Operands that the sums are multiplied by get a part of their
gradient from every rank; summands that every rank has whole are divided among the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.mutation import has_mutable_schema
from merak.graph.ir.operators import (
    CONCATENATIONS,
    CONVERSIONS,
    COPIES,
    EXPANDS,
    FILLS_LIKE,
    FILLS_NEW,
    FILLS_SHAPE,
    MATMULS,
    NARROWS,
    RESHAPES,
    SHAPED_LIKE,
    SPLITS,
    SQUEEZES,
    TRANSPOSES,
    family,
)
from merak.graph.tensor_parallel.placement import (
    PARTIAL,
    REPLICATE_PARTIAL_GRAD,
    Decision,
    ExpertRows,
    Operator,
    Partial,
    PartlySharded,
    Placement,
    Shard,
)

Terms = tuple[Any, ...]
"""Operands in which an operator is linear, all together."""


def carry(op: Operator) -> Decision | None:
    """Decision of an operator that is linear in its partial sums.

    Args:
        op: an operator with partial sums among its operands.

    Returns:
        A partial sum for partial sums; None where they must be reduced before.
    """
    operands = op.node.all_input_nodes
    sums = [
        n for n in operands if isinstance(op.raw(n), (Partial, ExpertRows)) and n not in op.reduced
    ]
    if not sums or any(isinstance(op.raw(n), (Shard, PartlySharded)) for n in operands):
        return None
    terms = _terms(op, sums)
    is_linear = terms is not None and all(n in terms for n in sums) and _is_precise(op.node, sums)
    if terms is None or not is_linear or not _may_write(op, terms):
        return None
    needs: dict[fx.Node, Placement] = dict.fromkeys(operands, REPLICATE_PARTIAL_GRAD)
    needs |= dict.fromkeys(terms, PARTIAL)
    results = op.node.meta.get("tensor")
    return Decision((PARTIAL,) * len(results) if isinstance(results, tuple) else PARTIAL, needs)


def _terms(op: Operator, sums: list[fx.Node]) -> list[fx.Node] | None:
    """Operands in which an operator is linear; None where it is not."""
    name = family(op.node.target)
    rule = _TERMS.get(name) or _TERMS.get(name.removesuffix("_"))
    found = rule(op, sums) if rule is not None else None
    if found is None:
        return None
    terms = list(_flat(found))
    return terms if all(isinstance(term, fx.Node) for term in terms) else None


def _flat(found: Any) -> Iterator[Any]:
    for term in found:
        if isinstance(term, (list, tuple)):
            yield from term
        elif not (isinstance(term, (int, float)) and term == 0):
            yield term


def _is_precise(node: fx.Node, sums: list[fx.Node]) -> bool:
    """Whether the result holds the sums' numbers; what it would round is summed before."""
    found = node.meta.get("tensor")
    results = found if isinstance(found, tuple) else (found,)
    for meta in (*(n.meta.get("tensor") for n in sums), *results):
        if not isinstance(meta, TensorMeta) or not meta.dtype.is_floating_point:
            return False
    pairs = {(n.meta["tensor"].dtype, result.dtype) for n in sums for result in results}
    return all(own == made or torch.promote_types(own, made) == made for own, made in pairs)


def _may_write(op: Operator, terms: list[fx.Node]) -> bool:
    """Whether what is written into is a partial sum, or new and read by nothing else."""
    written = op.node.args[0] if op.node.args else None
    if not has_mutable_schema(op.node) or not isinstance(written, fx.Node):
        return True
    if isinstance(op.raw(written), Partial):
        return written not in op.reduced
    is_new = family(written.target) in FILLS_LIKE | FILLS_NEW | FILLS_SHAPE
    return is_new and len(written.users) == 1 and written in terms


def _first(op: Operator, sums: list[fx.Node]) -> Terms | None:
    return (op.node.args[0],)


def _joint(*names: str) -> Callable[[Operator, list[fx.Node]], Terms | None]:
    """Linear in several operands together."""

    def terms(op: Operator, sums: list[fx.Node]) -> Terms | None:
        return tuple(op.arg(name) for name in names)

    return terms


def _either(op: Operator, sums: list[fx.Node]) -> Terms | None:
    """Linear in each operand by itself."""
    flat = list(_flat(op.node.args))
    return tuple(sums) if len(sums) == 1 and flat.count(sums[0]) == 1 else None


def _quotient(op: Operator, sums: list[fx.Node]) -> Terms | None:
    return None if op.arg("rounding_mode") is not None else (op.node.args[0],)


def _unbiased(op: Operator, sums: list[fx.Node]) -> Terms | None:
    return None if op.arg("bias") is not None else _either(op, sums)


def _undropped(op: Operator, sums: list[fx.Node]) -> Terms | None:
    return None if op.arg("train") and op.arg("p") else (op.node.args[0],)


def _padded(op: Operator, sums: list[fx.Node]) -> Terms | None:
    is_constant = op.arg("mode", "constant") == "constant" and not op.arg("value")
    return (op.node.args[0],) if is_constant else None


def _filled(op: Operator, sums: list[fx.Node]) -> Terms | None:
    return _joint("self", "value")(op, sums) if not isinstance(op.arg("value"), fx.Node) else None


_TERMS: Mapping[str, Callable[[Operator, list[fx.Node]], Terms | None]] = {
    **dict.fromkeys(
        RESHAPES | SHAPED_LIKE | TRANSPOSES | SQUEEZES | COPIES | CONVERSIONS | EXPANDS, _first
    ),
    **dict.fromkeys(SPLITS | NARROWS | {"select"}, _first),
    **dict.fromkeys(("neg", "sum", "mean", "cumsum", "flip", "roll", "tril", "triu"), _first),
    **dict.fromkeys(("index", "index_select", "gather", "repeat", "repeat_interleave"), _first),
    **dict.fromkeys(("add", "sub"), _joint("self", "other")),
    **dict.fromkeys(("scatter", "scatter_add"), _joint("self", "src")),
    "index_add": _joint("self", "source"),
    "index_copy": _joint("self", "source"),
    "index_put": _joint("self", "values"),
    "where": _joint("self", "other"),
    "masked_fill": _filled,
    **dict.fromkeys(CONCATENATIONS | {"stack"}, _joint("tensors")),
    **dict.fromkeys(MATMULS | {"mul", "einsum"}, _either),
    "linear": _unbiased,
    "div": _quotient,
    "dropout": _undropped,
    "pad": _padded,
    "constant_pad_nd": _padded,
}
"""Families to the operands in which they are linear."""
