"""Fused layers: parts of a weight's outputs that the graph takes apart again."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

from torch import fx

from merak.core.errors import ShardError
from merak.graph.ir.operators import NARROWS, RESHAPES, SPLITS, family
from merak.graph.tensor_parallel.placement import (
    Decision,
    Degree,
    Operator,
    Shard,
    positive,
    shape_of,
)
from merak.graph.tensor_parallel.propagate import decide_or_gather, propagate
from merak.graph.tensor_parallel.rules.indexing import extent
from merak.graph.tensor_parallel.rules.rules import decide
from merak.graph.tensor_parallel.rules.views import split_dims

_MAX_REFINEMENTS = 8
"""How often the parts of one weight are refined: a fused layer holds few kinds of things."""


def fused_parts(graph: fx.Graph, name: str, dim: int, size: int) -> list[tuple[int, ...]]:
    """Candidate parts of a fused dim of a weight, coarsest first.

    The dim is followed through the graph as if one rank held it all. Where an operator takes it
    apart (split, slice, unbind, …), the weight must be split part by part.

    Args:
        graph: the segment.
        name: the parameter.
        dim: its dim.
        size: of that dim.

    Returns:
        Part sizes; the first is the dim in one piece.
    """
    found: list[tuple[int, ...]] = [(size,)]
    while len(found) <= _MAX_REFINEMENTS:
        finer = _finer(graph, name, Shard(dim, found[-1], name))
        new = next((own for own in finer if own not in found), None)
        if new is None:
            break
        found.append(new)
    return found


def stacked_parts(node: fx.Node, dim: int) -> list[tuple[int, ...]]:
    """Parts of a weight's dim that the graph sees as two, such as experts and what each has.

    Args:
        node: the parameter.
        dim: its dim.

    Returns:
        Part sizes, one for each element of the first of the two dims.
    """
    found = []
    for user in node.users:
        sources = None
        if family(user.target) in RESHAPES:
            sources = split_dims(shape_of(node), shape_of(user))
        if sources is not None and sources.count(dim) == 2:
            place = sources.index(dim)
            number, size = shape_of(user)[place : place + 2]
            found.append((size,) * number)
    return list(dict.fromkeys(found))


def _finer(graph: fx.Graph, name: str, placed: Shard) -> Iterator[tuple[int, ...]]:
    """Parts that operators which refuse a weight's shards cut it into, one after another."""
    refused: list[Operator] = []

    def rule(op: Operator) -> Decision:
        try:
            return decide(op)
        except ShardError:
            refused.append(op)
            return decide_or_gather(op)

    try:
        propagate(graph, {name: placed}, 1, rule)
    except ShardError:
        return
    for op in refused:
        for operand, sharded in list(op.sharded().items())[:1]:
            finer = _refined(placed, sharded.parts, _edges(op, operand, sharded))
            if finer is not None:
                yield finer


def _refined(placed: Shard, parts: tuple[int, ...], edges: set[int]) -> tuple[int, ...] | None:
    """Parts of the weight, cut where the operator cuts a dim of `parts` that it became.

    That dim is all of the weight's, or some of its parts: all parts like those are cut so.
    """
    total, size, count = sum(placed.parts), sum(parts), len(parts)
    own = [sum(placed.parts[:i]) for i in range(len(placed.parts) + 1)]
    runs = range(len(placed.parts) - count + 1)
    starts = [own[i] for i in runs if placed.parts[i : i + count] == parts]
    found = {start + edge for start in starts for edge in edges}
    if not starts and total % size == 0:
        found = {edge * (total // size) for edge in edges}
    if not found:
        return None
    return tuple(b - a for a, b in pairwise(sorted(found.union(own))))


_CUTTING = SPLITS | NARROWS | {"select"}


def _edges(op: Operator, operand: fx.Node, placed: Shard) -> set[int]:
    """Edges at which an operator cuts the sharded dim of its operand."""
    name, size = family(op.node.target), shape_of(operand)[placed.dim]
    if (
        name not in _CUTTING
        or positive(op.arg("dim", 0) or 0, len(shape_of(operand))) != placed.dim
    ):
        return set()
    if name == "unbind":
        return set(range(size + 1))
    if name == "select":
        index = positive(op.arg("index"), size)
        return {index, index + 1}
    if name in NARROWS:
        return set(extent(op, size))
    sizes = [result.shape[placed.dim] for result in op.node.meta["tensor"]]
    return {sum(sizes[:i]) for i in range(len(sizes) + 1)}


def divides(placed: Shard, degree: Degree) -> bool:
    """Whether the degree divides every fused part, or groups of ranks with the same shard do."""
    return math.gcd(*placed.parts) * placed.copies % degree == 0
