"""Reduction points of partial sums: of all values that they travel through, the smallest.

Sums travel as far as operators are linear in them. Between where they arise and what must read them
whole, they are reduced in the values that are smallest together: a minimum cut. What the sums are
multiplied by on their way costs the reduction of its gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from torch import fx

from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.reachable import Edge, source_side
from merak.graph.tensor_parallel.placement import (
    PARTIAL,
    REPLICATE,
    Decision,
    Partial,
    ResultPlacement,
)

_SOURCE, _SINK = "source", "sink"


def early_reductions(
    graph: fx.Graph,
    placements: Mapping[fx.Node, ResultPlacement],
    decisions: Mapping[fx.Node, Decision],
) -> frozenset[fx.Node]:
    """Partial sums to reduce for all of their readers, though some are linear in them.

    Args:
        graph: the segment's operators.
        placements: of their results, where sums travel as far as they can.
        decisions: about the operators.
    """
    sums = {n for n in graph.nodes if _is_sum(placements.get(n))}
    carriers = [n for n in sums if _carried(n, decisions, sums)]
    if all(len(n.all_input_nodes) == 1 and _size(n) == _size(n.args[0]) for n in carriers):
        return frozenset()  # as of nearly every block: sums in other shapes
    edges = list(_edges(graph, placements, decisions, sums))
    behind = source_side(edges, _SOURCE, _SINK)
    return frozenset(n for n in sums if (n, "in") in behind and (n, "out") not in behind)


def _edges(
    graph: fx.Graph,
    placements: Mapping[fx.Node, ResultPlacement],
    decisions: Mapping[fx.Node, Decision],
    sums: set[fx.Node],
) -> Iterator[Edge]:
    """Flow network: the capacity of a sum is its size, and all of its readers are behind it."""
    for node in graph.nodes:
        if node not in sums:
            continue
        # A tuple is not reduced itself, but what is taken from it.
        size = math.inf if isinstance(placements[node], tuple) else _size(node)
        yield (node, "in"), (node, "out"), size
        if not _carried(node, decisions, sums):
            yield _SOURCE, (node, "in"), math.inf
        for reader in node.users:
            is_carried = reader in sums and node in _carried(reader, decisions, sums)
            yield (node, "out"), ((reader, "in") if is_carried else _SINK), math.inf
        factors = _gradients(node, placements, decisions, sums)
        if factors:
            yield (node, "in"), _SINK, float(factors)


def _carried(
    node: fx.Node, decisions: Mapping[fx.Node, Decision], sums: set[fx.Node]
) -> list[fx.Node]:
    """Operands of an operator that stay partial sums."""
    decision = decisions.get(node)
    if decision is None:
        return []
    return [
        n
        for n in node.all_input_nodes
        if n in sums
        and (decision.needs.get(n) == PARTIAL or not isinstance(n.meta.get("tensor"), TensorMeta))
    ]


def _gradients(
    node: fx.Node,
    placements: Mapping[fx.Node, ResultPlacement],
    decisions: Mapping[fx.Node, Decision],
    sums: set[fx.Node],
) -> int:
    """Size of the gradients that the ranks sum if an operator multiplies partial sums."""
    if not _carried(node, decisions, sums):
        return 0
    return sum(
        _size(n)
        for n in node.all_input_nodes
        if placements[n] == REPLICATE
        and decisions[node].needs.get(n) != PARTIAL
        and n.meta["tensor"].requires_grad
    )


def _is_sum(placed: ResultPlacement | None) -> bool:
    each = placed if isinstance(placed, tuple) else (placed,)
    return any(isinstance(p, Partial) for p in each)


def _size(node: object) -> int:
    """Bytes of a value."""
    meta = node.meta.get("tensor") if isinstance(node, fx.Node) else None
    return math.prod(meta.shape) * meta.dtype.itemsize if isinstance(meta, TensorMeta) else 0
