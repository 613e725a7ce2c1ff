"""Automatic sharding of a model's weights, from its traced graph alone.

Every segment is searched by itself (`search`); segments of the same structure get the same
answer, so a deep model takes no longer than a shallow one. Embeddings and heads, which several
segments may share, are sharded before (`vocabularies`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from merak.core.errors import ShardError
from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import Kind, ModelGraph, Segment
from merak.graph.ir.structure import structure_of_graph
from merak.graph.tensor_parallel.placement import PartlySharded, Shard
from merak.graph.tensor_parallel.search.cost import Transfer
from merak.graph.tensor_parallel.search.search import Search
from merak.graph.tensor_parallel.search.twins import differ, find_twins, matched_placements
from merak.graph.tensor_parallel.search.vocabularies import (
    embeddings,
    loss_weights,
    split_vocabularies,
)

WeightPlacement = Shard | PartlySharded
WeightPlacements = Mapping[str, WeightPlacement]


@dataclass(frozen=True, slots=True)
class SegmentTask:
    """Search task of one segment: its given and replicated weights.

    Args:
        segment: the segment.
        given: weights whose split is given, by name.
        replicated: parameters that are not to be split.
        heads: weights that are split only together with those before them.
    """

    segment: Segment
    given: WeightPlacements
    replicated: frozenset[str]
    heads: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class SegmentSharding:
    """Sharding of one segment's weights, and the collectives it runs.

    Args:
        weights: the split parameters it reads, by name.
        inside: operators on whole values that every rank runs for its own part of the gradient.
        transfers: the collectives it then runs.
        like: the first segment with the same sharding, which differs in names alone.
    """

    weights: WeightPlacements
    inside: frozenset[fx.Node]
    transfers: tuple[Transfer, ...]
    like: Segment


class AutoSharder:
    """Cached search for the sharding of one model's segments, by the segments' structure.

    Args:
        parameters: shape and dtype of every parameter of the whole model, by name.
        degree: the number of tensor parallel ranks.
    """

    def __init__(self, parameters: Mapping[str, TensorMeta], degree: int) -> None:
        self.parameters = parameters
        self.degree = degree
        self._known: dict[Any, tuple[Segment, SegmentSharding]] = {}

    def __call__(self, task: SegmentTask) -> SegmentSharding:
        """Sharding of a segment's weights that are neither given nor replicated."""
        key = tuple(structure_of(task))
        if key not in self._known:
            search = Search(task.segment, self.parameters, self.degree, task.replicated, task.given)
            found = search.run(task.heads)
            weights = {n: p for n, p in found.weights.items() if isinstance(p, WeightPlacement)}
            split = SegmentSharding(weights, found.inside, found.transfers, task.segment)
            self._known[key] = (task.segment, split)
        return _carried_over(*self._known[key], task.segment)


def auto_shard(
    model: ModelGraph,
    auto_sharder: AutoSharder,
    given: WeightPlacements,
    replicated: frozenset[str],
) -> dict[str, WeightPlacement]:
    """Placements of a model's weights, chosen segment by segment.

    Args:
        model: the traced model.
        auto_sharder: for this model's parameters and degree.
        given: weights whose split is given, by name.
        replicated: parameters that are not to be split.

    Returns:
        The split parameters, by name. A parameter that several segments read is split in one way.
    """
    chosen: dict[str, WeightPlacement] = {**given}
    chosen |= split_vocabularies(model, auto_sharder.degree, given, replicated)
    whole = replicated | (embeddings(model) - chosen.keys())
    heads = frozenset(loss_weights(model))
    for segment in model.segments:
        own = {n: chosen[n] for n in segment.parameters if n in chosen}
        split = auto_sharder(
            SegmentTask(segment, own, whole.intersection(segment.parameters), heads)
        )
        chosen |= split.weights
        whole |= frozenset(segment.parameters) - chosen.keys()
    return _match_twins(model, auto_sharder, chosen, given.keys() | replicated)


def _match_twins(
    model: ModelGraph,
    auto_sharder: AutoSharder,
    chosen: dict[str, WeightPlacement],
    fixed: Collection[str],
) -> dict[str, WeightPlacement]:
    """Placements in which teachers are sharded as their students, where the operators allow it.

    Args:
        model: the traced model.
        auto_sharder: for this model's parameters and degree.
        chosen: placements of the split parameters, by name.
        fixed: names of parameters whose placement is the user's.
    """
    twins = find_twins(model.parameters)
    if not differ(twins, chosen):
        return chosen
    concerned = [s for s in model.segments if {*twins, *twins.values()} & {*s.parameters}]
    for placed in matched_placements(twins, chosen, fixed):
        if all(_runs(segment, auto_sharder, placed) for segment in concerned):
            return placed
    return chosen


def _runs(segment: Segment, auto_sharder: AutoSharder, placed: WeightPlacements) -> bool:
    """Whether the operators of a segment run on weights that are split so."""
    own = {name: placed[name] for name in segment.parameters if name in placed}
    whole = frozenset(segment.parameters)
    search = Search(segment, auto_sharder.parameters, auto_sharder.degree, whole, own)
    return search.judge(own) is not None and search.runs(own)


def check_limits(model: ModelGraph, degree: int) -> None:
    """Check, where a degree shards nothing, that no smaller degree fits.

    Where the weights could be cut so often, but what runs between them would have to be gathered,
    every rank trains the whole model.

    Raises:
        ShardError: a smaller degree fits; the sentence says what limits the degree.
    """
    limits = limits_of(model)
    pieces = {name: limits[name] for name in _largest(model, limits)}
    counts = pieces.values()
    fitting = [d for d in range(1, max(counts, default=1) + 1) if any(n % d == 0 for n in counts)]
    if len(fitting) > 1 and degree not in fitting:
        listed = ", ".join(f"{name} into {count}" for name, count in pieces.items())
        raise ShardError(
            f"tp={degree} can split nothing of this model: the outputs of {listed} pieces at the "
            f"most; degrees that split something are {', '.join(map(str, fitting))}."
        )


def _largest(model: ModelGraph, names: Iterable[str]) -> list[str]:
    """Up to four of the parameters that are not much smaller than the largest."""
    sizes = {name: math.prod(model.parameters[name].shape) for name in names}
    return [name for name, size in sizes.items() if 4 * size >= max(sizes.values())][:4]


def limits_of(model: ModelGraph) -> dict[str, int]:
    """Number of pieces that each weight's outputs can be cut into, by name."""
    found: dict[str, int] = {}
    known: dict[Any, tuple[int | None, ...]] = {}
    whole = frozenset(embeddings(model) | loss_weights(model))
    for segment in model.segments:
        key = tuple(structure_of(SegmentTask(segment, {}, whole)))
        if key not in known:
            limits = Search(segment, model.parameters, 1, whole, {}).limits()
            known[key] = tuple(limits.get(name) for name in segment.parameters)
        pairs = zip(segment.parameters, known[key], strict=True)
        found |= {name: pieces for name, pieces in pairs if pieces is not None}
    return found


def structure_of(task: SegmentTask) -> Iterator[Any]:
    """Key of a segment's search: its operators, their shapes, and what is given."""
    yield structure_of_graph(task.segment.graph)
    for node in task.segment.graph.find_nodes(op="placeholder"):
        kind, name = node.meta["kind"], node.meta["name"]
        if kind is Kind.PARAMETER:
            given = task.given.get(name)
            split = given and (given, given.dim)
            yield split, name in task.replicated, name in task.heads


def _carried_over(like: Segment, split: SegmentSharding, segment: Segment) -> SegmentSharding:
    """Sharding of a segment of the same structure."""
    if like is segment:
        return split
    names = dict(zip(like.parameters, segment.parameters, strict=True))
    nodes = dict(zip(like.graph.nodes, segment.graph.nodes, strict=True))
    weights = {names[n]: replace(p, origin=names[n]) for n, p in split.weights.items()}
    inside = frozenset(nodes[n] for n in split.inside)
    return SegmentSharding(weights, inside, split.transfers, like)
