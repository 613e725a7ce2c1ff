"""Plan of sequence parallelism: which values of a model are sharded over the sequence.

Every segment is planned after those before it, since it reads what they leave. Of the ways in which
it can run, the one with the least traffic is taken: where its sums become sharded, along which dim,
and whether what enters sharded is gathered at once. Segments of the same structure that read
alike get the same answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from torch import fx

from merak.core.errors import ShardError
from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import Kind, ModelGraph, Segment, returned_nodes
from merak.graph.ir.operators import weights_only
from merak.graph.tensor_parallel.placement import (
    REPLICATE,
    Partial,
    Shard,
    local_meta,
    shape_of,
)
from merak.graph.tensor_parallel.propagate import Propagation
from merak.graph.tensor_parallel.rewrite import rewrite
from merak.graph.tensor_parallel.rules.views import reshaped
from merak.graph.tensor_parallel.search.auto_shard import SegmentSharding, SegmentTask, structure_of
from merak.graph.tensor_parallel.search.cost import (
    ALL_REDUCES,
    Transfer,
    conversions,
    transfers,
)
from merak.graph.tensor_parallel.sequence.propagate import (
    SequenceChoice,
    SequencePropagation,
    propagate_sequence,
)

Split = Callable[[Segment], SegmentSharding]

_LEAVES_WHOLE = 1.5
"""Cost of an unsharded result to the segments that read it, in all-gathers of it."""

_KEPT_WHOLE = 2e-2
"""Cost of holding a value unsharded, in all-gathers of it."""

_PER_COLLECTIVE = 1e-2
"""Latency of a collective of activations, in all-gathers of an activation."""

_ROUNDS = 8
"""How many values of one segment may become sharded, one after another."""

_WORTH_OTHER_DIM = 0.95
"""Samples are shared out in place of tokens only where it saves more than rounding."""


@dataclass(frozen=True, slots=True)
class SegmentSequencePlan:
    """Sequence parallelism of one segment.

    Args:
        propagate: gives the placements of its values, when they are first asked for.
        transfers: the collectives it runs.
        cost: what was minimised.
        choice: what was chosen.
        like: the first segment with the same plan, which differs in names alone.
        leaving: the results that leave sharded, by name.
    """

    propagate: Callable[[], SequencePropagation]
    transfers: tuple[Transfer, ...]
    cost: float
    choice: SequenceChoice
    like: Segment
    leaving: Mapping[str, Shard] = field(default_factory=dict)

    @property
    def propagated(self) -> SequencePropagation:
        """Placements of its values."""
        return self.propagate()


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """Sequence parallelism of a model's segments.

    Args:
        segments: by index.
        values: the values between segments that are sharded.
    """

    segments: Mapping[int, SegmentSequencePlan]
    values: Mapping[str, Shard]

    @property
    def cost(self) -> float:
        """Cost of all segments."""
        return sum(segment.cost for segment in self.segments.values())

    def local_values(self, model: ModelGraph, degree: int) -> dict[str, TensorMeta]:
        """Local shape and dtype of every value between segments."""
        return {
            name: local_meta(meta, self.values[name], degree) if name in self.values else meta
            for name, meta in model.values.items()
        }


def plan_sequence(model: ModelGraph, split: Split, degree: int) -> SequencePlan:
    """Plan of sequence parallelism for a model, at the least communication.

    Shares are of the longest dim; where an architecture must see whole sequences too often, of the
    samples.

    Args:
        model: the traced model.
        split: how the weights of a segment are split.
        degree: the number of ranks.
    """
    by_tokens = _Planner(model, split, degree, longest_first=True).run()
    by_samples = _Planner(model, split, degree, longest_first=False).run()
    return by_samples if by_samples.cost < _WORTH_OTHER_DIM * by_tokens.cost else by_tokens


class _Planner:
    """Planner of one model.

    Args:
        model: the traced model.
        split: how the weights of a segment are split.
        degree: the number of ranks.
        longest_first: whether to prefer the longest dim to shard, or else the first.
    """

    def __init__(
        self, model: ModelGraph, split: Split, degree: int, *, longest_first: bool
    ) -> None:
        self.model = model
        self.split = split
        self.degree = degree
        self.longest_first = longest_first
        self.returned = frozenset(model.outputs.values())
        self.values: dict[str, Shard] = {}
        self._known: dict[Any, SegmentSequencePlan] = {}

    def run(self) -> SequencePlan:
        found: dict[int, SegmentSequencePlan] = {}
        for segment in self.model.segments:
            found[segment.index] = self.segment(segment)
            self.values |= found[segment.index].leaving
        return SequencePlan(found, self.values)

    def segment(self, segment: Segment) -> SegmentSequencePlan:
        """Plan of one segment; segments of the same structure have the same one."""
        judge = _Judge(segment, self)
        key = (
            judge.likeness(),
            *structure_of(SegmentTask(segment, judge.split.weights, frozenset())),
        )
        if key not in self._known:
            best = judge.best()
            own = judge.leaving(best.propagated.propagation)
            self._known[key] = replace(best, leaving=own)
            return self._known[key]
        found = self._known[key]
        choice = _carried_over(found.choice, found.like, segment)
        names = dict(zip(found.like.outputs, segment.outputs, strict=True))
        return replace(
            found,
            propagate=cache(lambda: judge.propagated(choice)),
            choice=choice,
            leaving={names[name]: placed for name, placed in found.leaving.items()},
        )


class _Judge:
    """Cost of the choices for one segment."""

    def __init__(self, segment: Segment, planner: _Planner) -> None:
        self.segment = segment
        self.graph = segment.graph
        self.planner = planner
        self.degree = planner.degree
        self.split = planner.split(segment)
        self.weights = weights_only(self.graph)
        self.entering = {
            node: planner.values[node.meta["name"]]
            for node in self.graph.find_nodes(op="placeholder")
            if node.meta["kind"] is Kind.VALUE and node.meta["name"] in planner.values
        }
        outputs = zip(segment.outputs, returned_nodes(self.graph), strict=True)
        self.crossing = {node: name for name, node in outputs if name not in planner.returned}
        for name, node in zip(segment.outputs, returned_nodes(self.graph), strict=True):
            if name in planner.returned:
                self.crossing.pop(node, None)
        self.scale = max((math.prod(shape_of(n)) for n in self.entering), default=0)

    def likeness(self) -> tuple[Any, ...]:
        """Key of the answer, besides the segment's structure."""
        entering = tuple(self.entering.get(n) for n in self.graph.find_nodes(op="placeholder"))
        return entering, tuple(node in self.crossing for node in returned_nodes(self.graph))

    def leaving(self, propagated: Propagation) -> dict[str, Shard]:
        """Results that are sharded."""
        placed = {name: propagated.leaving(node) for node, name in self.crossing.items()}
        return {name: p for name, p in placed.items() if isinstance(p, Shard)}

    def best(self) -> SegmentSequencePlan:
        """Choice with the least communication that can be rewritten."""
        inside, entering = self.split.inside, frozenset(self.entering)
        starts = [SequenceChoice(inside), SequenceChoice(), SequenceChoice(inside, {}, entering)]
        found = [best for start in starts if (best := self.improved(start)) is not None]
        for candidate in sorted(found, key=lambda found: found.cost):
            if self.runs(candidate):
                return candidate
        last = self(SequenceChoice(inside, {}, entering))
        if last is None:
            raise ShardError(f"segment {self.segment.index} runs on whole values alone.")
        return last

    def __call__(self, choice: SequenceChoice) -> SegmentSequencePlan | None:
        """Cost of a choice; None where it is impossible."""
        try:
            propagated = self.propagated(choice)
            needed = tuple(transfers(self.graph, propagated.propagation))
        except ShardError:
            return None
        cost = sum(map(self.price, needed)) + sum(self.weight_of_whole(propagated))
        return SegmentSequencePlan(lambda: propagated, needed, cost, choice, self.segment)

    def propagated(self, choice: SequenceChoice) -> SequencePropagation:
        """Placements of the segment's values under a choice.

        Raises:
            ShardError: it is impossible.
        """
        return propagate_sequence(
            self.graph, self.split, self.entering, choice, self.degree, self.crossing
        )

    def runs(self, found: SegmentSequencePlan) -> bool:
        """Whether the operators run on their shards."""
        try:
            rewrite(self.graph, found.propagated.propagation, self.degree)
        except ShardError:
            return False
        return True

    def price(self, transfer: Transfer) -> float:
        size = transfer.numel * (2.0 if transfer.kind in ALL_REDUCES else 1.0)
        return size if transfer.of_weights else size + _PER_COLLECTIVE * self.scale

    def weight_of_whole(self, propagated: SequencePropagation) -> Iterator[float]:
        """Costs of holding values replicated, and of handing them on."""
        for node, placed in propagated.propagation.placements.items():
            if self.is_activation(node) and not isinstance(placed, Shard):
                yield _KEPT_WHOLE * math.prod(shape_of(node))
        for node in self.crossing:
            if self.may_leave_shared(node) and node not in propagated.propagation.outputs:
                yield _LEAVES_WHOLE * math.prod(shape_of(node))

    def may_leave_shared(self, node: fx.Node) -> bool:
        """Whether a result is like what enters sharded, as a residual stream is."""
        num_dims = {len(shape_of(source)) for source in self.entering}
        is_like = not num_dims or len(shape_of(node)) in num_dims
        return node in self.crossing and is_like and self.is_activation(node)

    def is_activation(self, node: fx.Node) -> bool:
        meta = node.meta.get("tensor")
        if node in self.weights or not isinstance(meta, TensorMeta):
            return False
        return node.op == "call_function" and meta.dtype.is_floating_point

    def improved(self, start: SequenceChoice) -> SegmentSequencePlan | None:
        """Best choice that is reached by sharding one value after another."""
        best = self(start)
        for _ in range(_ROUNDS):
            if best is None:
                break
            trials = [t for c in self.neighbours(best) if (t := self(c)) is not None]
            nearest = min(trials, key=lambda found: found.cost, default=best)
            if nearest.cost >= best.cost - 1e-9:
                break
            best = nearest
        return best

    def neighbours(self, found: SegmentSequencePlan) -> Iterator[SequenceChoice]:
        """Choices in which one more value is sharded."""
        landing = found.choice.landing
        for node in self.sites(found.propagated.propagation):
            if node not in landing:
                for placed in self.ways(node):
                    yield replace(found.choice, landing={**landing, node: placed})

    def sites(self, propagated: Propagation) -> Iterator[fx.Node]:
        """Partial sums that are otherwise all-reduced, and replicated values to be sharded."""
        for node, need in conversions(self.graph, propagated):
            if isinstance(propagated.placements[node], Partial) and not isinstance(need, Shard):
                yield node
        sizes = {math.prod(shape_of(node)) for node in self.crossing}
        for node in self.graph.nodes:
            if not self.is_activation(node) or propagated.placements[node] != REPLICATE:
                continue
            if self.may_leave_shared(node) or (
                not self.entering and math.prod(shape_of(node)) in sizes
            ):
                yield node

    def ways(self, node: fx.Node) -> Iterator[Shard]:
        """Placements of a value: like what enters, then along dims by preference."""
        shape = shape_of(node)
        for source, placed in self.entering.items():
            if math.prod(shape_of(source)) == math.prod(shape):
                like = reshaped(shape_of(source), shape, placed, self.degree)
                if like is not None:
                    yield like
        dims = list(range(len(shape) - 1))
        if self.planner.longest_first:
            dims.sort(key=lambda dim: (-shape[dim], -dim))
        for dim in dims:
            if shape[dim] % self.degree == 0:
                yield Shard(dim, (shape[dim],))


def _carried_over(choice: SequenceChoice, like: Segment, segment: Segment) -> SequenceChoice:
    """Choice for a segment of the same structure."""
    nodes = dict(zip(like.graph.nodes, segment.graph.nodes, strict=True))
    return SequenceChoice(
        frozenset(nodes[n] for n in choice.inside),
        {nodes[n]: placed for n, placed in choice.landing.items()},
        frozenset(nodes[n] for n in choice.whole),
    )
