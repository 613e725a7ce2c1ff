"""Sharding rules of experts that are split whole: each rank has some, and computes their rows."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx

from merak.graph.ir.mutation import has_mutable_schema
from merak.graph.ir.operators import (
    CONVERSIONS,
    COPIES,
    GROUPED_GEMMS,
    NARROWS,
    NORMS,
    RESHAPES,
    SEPARATE_EXPERTS,
    SEPARATE_GEMMS,
    SOFTMAXES,
    SPLITS,
    draws,
    family,
    is_pointwise,
)
from merak.graph.tensor_parallel.placement import (
    AXIS,
    REPLICATE,
    REPLICATE_PARTIAL_GRAD,
    Decision,
    ExpertRows,
    Operator,
    PartlySharded,
    Placement,
    Shard,
    argument,
    is_opaque,
    positive,
    shape_of,
)
from merak.ops.expert_rows import (
    grouped_linear_rows,
    grouped_mm_fallback_rows,
    grouped_mm_rows,
    grouped_values_rows,
    pick_expert_rows,
)

_PRODUCTS: dict[str, Callable[..., torch.Tensor]] = {
    "_grouped_mm": grouped_mm_rows,
    "grouped_mm_fallback": grouped_mm_fallback_rows,
}
"""Grouped products to those of a rank's own experts."""

_COUNTS = CONVERSIONS | COPIES | RESHAPES | {"cumsum", "histc", "bincount", "clamp", "clamp_"}
"""What is between sorted experts and the offsets of their rows."""


def grouped(op: Operator) -> Decision:
    """Grouped products by the own experts' weights: only their rows are multiplied."""
    x, weight, offsets = grouped_operands(op.node)
    placed = op.placement(weight)
    assert isinstance(placed, Shard)
    if placed.parts != shape_of(offsets) or op.node.kwargs.keys() - {"offs"}:
        raise op.error("multiplies by experts whose number is not that of the offsets")
    rows = ExpertRows(sorted_by(offsets), offsets)
    needs: dict[fx.Node, Placement] = {x: rows, weight: placed, offsets: REPLICATE}
    target = _PRODUCTS[family(op.node.target)]
    return Decision(rows, needs, target, (x, weight, offsets, AXIS), {})


def pick(op: Operator) -> Decision:
    """index: every row's own expert's values, as biases; rows sorted by expert."""
    values, ids = op.node.args[0], op.node.args[1][0]  # type: ignore[index]
    assert isinstance(values, fx.Node) and isinstance(ids, fx.Node)
    placed, offsets = op.placement(values), offsets_of(ids)
    assert isinstance(placed, Shard)
    if offsets is None or offsets not in op.placements or placed.parts != shape_of(offsets):
        raise op.error("picks elements along a dim that is split")
    rows = ExpertRows(sorted_by(ids), offsets)
    needs: dict[fx.Node, Placement] = {values: placed, ids: REPLICATE}
    return Decision(rows, needs, pick_expert_rows, (values, ids, AXIS), {})


def separate(op: Operator) -> Decision:
    """Products by, and values of, experts with parameters of their own: the rank's own ones'."""
    x, weights, offsets, skips_idle, *rest = op.node.args
    assert isinstance(x, fx.Node) and isinstance(offsets, fx.Node)
    assert isinstance(weights, (list, tuple))
    placed = {w: op.placement(w) for w in weights if isinstance(w, fx.Node)}
    if not all(isinstance(p, Shard) and p.owner is not None for p in placed.values()):
        raise op.error("reads parameters of experts of which some ranks have only some")
    rows = ExpertRows(sorted_by(offsets), offsets)
    is_product = family(op.node.target) in SEPARATE_GEMMS
    target = grouped_linear_rows if is_product else grouped_values_rows
    needs: dict[fx.Node, Placement] = {offsets: REPLICATE, **placed}
    needs[x] = rows if is_product else REPLICATE
    return Decision(rows, needs, target, (x, weights, offsets, skips_idle, *rest, AXIS), {})


def are_owned(op: Operator, weights: Collection[fx.Node]) -> bool:
    """Whether some of an operator's parameters are each on one rank alone."""
    placed = map(op.placement, weights)
    return any(isinstance(p, Shard) and p.owner is not None for p in placed)


def decide_rows(op: Operator) -> Decision | None:
    """Decision on the rank's own rows, for operators that treat every row by itself.

    Args:
        op: an operator with rows of experts among its operands.

    Returns:
        The decision; None where the rows must leave the experts before.
    """
    if family(op.node.target) in GROUPED_GEMMS | SEPARATE_EXPERTS:
        return None
    operands = op.node.all_input_nodes
    found = {n: p for n in operands if isinstance(p := op.raw(n), ExpertRows)}
    (lead, *others) = found.values()
    is_split = any(isinstance(op.raw(n), (Shard, PartlySharded)) for n in operands)
    if is_split or any(p != lead for p in others) or not is_rowwise(op.node, found):
        return None
    written = op.node.args[0] if has_mutable_schema(op.node) else None
    if isinstance(written, fx.Node) and written not in found:
        return None
    needs: dict[fx.Node, Placement] = {}
    for node in operands:
        num_rows, shape = shape_of(next(iter(found)))[0], shape_of(node)
        has_rows = len(shape) == len(shape_of(next(iter(found)))) and shape[0] == num_rows
        is_weight = family(op.node.target) in NORMS and node not in found
        needs[node] = lead if has_rows and not is_weight else REPLICATE_PARTIAL_GRAD
    results = op.node.meta.get("tensor")
    return Decision((lead,) * len(results) if isinstance(results, tuple) else lead, needs)


def is_rowwise(node: fx.Node, rows: Collection[fx.Node], num_dims: int = 1) -> bool:
    """Whether an operator gives every row from the same row of its operands.

    Args:
        node: an operator of the traced graph.
        rows: its operands with a row for each row of its result, at least one.
        num_dims: dims in front that number the rows.
    """
    name, target = family(node.target).removesuffix("_"), node.target
    shape = shape_of(next(iter(rows)))
    if is_opaque(target) or draws(target):
        return False
    if name in RESHAPES:
        return len(shape_of(node)) >= num_dims and shape_of(node)[:num_dims] == shape[:num_dims]
    if name in SPLITS | NARROWS | SOFTMAXES | {"select", "squeeze", "unsqueeze", "glu"}:
        default = None if name == "squeeze" else -1 if name == "glu" else 0
        dim = argument(node, "dim", default)
        grown = len(shape) + (name == "unsqueeze")
        return isinstance(dim, int) and positive(dim, grown) >= num_dims
    if name in NORMS:
        normal: Any = argument(node, "normalized_shape", ())
        return node.args[0] in rows and 0 < len(normal) <= len(shape) - num_dims
    if not is_pointwise(target) and name not in CONVERSIONS | COPIES | {"detach"}:
        return False
    result = shape_of(node)
    return all(
        len(shape_of(n)) == len(result) and shape_of(n)[:num_dims] == result[:num_dims]
        for n in rows
    )


def sorted_by(node: fx.Node) -> fx.Node:
    """The operator that sorted some experts, or those of some offsets; else the node itself."""
    source = node
    while source.op == "call_function" and source.all_input_nodes:
        first, *others = source.all_input_nodes
        name = family(source.target)
        if name == "getitem" and family(first.target) == "sort":
            return first if source.args[1] == 0 else node
        if name in ("index", "gather", "index_select") and len(others) == 1:
            order = _order(others[0])  # experts in the order that sorts them
            return order if order is not None and order.args[0] is first else node
        is_by_ends = name == "searchsorted" and source.args[0] is first
        if not is_by_ends and (name not in _COUNTS or others):
            return node
        source = first
    return node


def _order(node: fx.Node) -> fx.Node | None:
    """The operator that sorted, of the order that it gave; None for other values."""
    if family(node.target) == "argsort":
        return node
    if family(node.target) != "getitem" or node.args[1] != 1:
        return None
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source if family(source.target) == "sort" else None


def offsets_of(experts: fx.Node) -> fx.Node | None:
    """The offsets of the grouped products whose rows are sorted as some experts are."""
    by = sorted_by(experts)
    for node in by.graph.nodes:
        if family(node.target) in GROUPED_GEMMS | SEPARATE_GEMMS:
            offsets = grouped_operands(node)[2]
            if isinstance(offsets, fx.Node) and sorted_by(offsets) is by:
                return offsets
    return None


def grouped_operands(node: fx.Node) -> tuple[Any, Any, Any]:
    """Rows, weights and offsets of a grouped product."""
    offsets = node.args[2] if len(node.args) > 2 else node.kwargs.get("offs")
    return node.args[0], node.args[1], offsets
