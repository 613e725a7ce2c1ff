"""Tensor parallelism as a rewriting of the traced graph: every rank runs its shard of a segment.

Three steps: placements of the weights are searched on the graph (`auto_shard`), or given by a
feature dict; they are propagated through the graph operator by operator (`propagate`), and the
graph is rewritten with local sizes and the collectives in between (`rewrite`). Values between
segments are replicated, or sharded over the sequence (`sequence`).

Source: Megatron-LM (arXiv 1909.08053, section 3); Merak (IEEE TPDS), section 4.1.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy  # type: ignore[import-untyped]
from torch import fx

from merak.core.errors import ShardError
from merak.core.rank0 import warn_once
from merak.core.shards import ParameterShard
from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import ModelGraph, Segment
from merak.graph.tensor_parallel.features import (
    Attribute,
    Column,
    Features,
    Replicate,
    Row,
    Vocabulary,
    resolve_features,
)
from merak.graph.tensor_parallel.placement import PartlySharded, Shard
from merak.graph.tensor_parallel.propagate import (
    capacities,
    decide_or_gather,
    decide_or_gather_parts,
    gather_operands,
    place_weights,
    propagate,
)
from merak.graph.tensor_parallel.rewrite import rewrite
from merak.graph.tensor_parallel.search.auto_shard import (
    AutoSharder,
    SegmentSharding,
    SegmentTask,
    WeightPlacement,
    WeightPlacements,
    auto_shard,
    check_limits,
)
from merak.graph.tensor_parallel.search.experts import (
    check_experts,
    experts_of,
    refuse_other_readers,
)
from merak.graph.tensor_parallel.search.no_experts import no_experts
from merak.graph.tensor_parallel.search.search import Search
from merak.graph.tensor_parallel.search.vocabularies import vocabularies
from merak.graph.tensor_parallel.sequence.plan import SequencePlan, plan_sequence

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class TensorParallel:
    """Rewriting of a model's segments into those of a tensor parallel rank.

    Args:
        auto_sharder: fits operators to split weights, and remembers how.
        weights: the split parameters.
        sequence: whether values are sharded over the sequence where they can be.
        sequence_plan: which do, in the graph that `fit` has seen.
    """

    auto_sharder: AutoSharder
    weights: WeightPlacements
    sequence: bool = False
    sequence_plan: SequencePlan | None = None

    def fit(self, model: ModelGraph) -> tuple[ModelGraph, TensorParallel]:
        """Plan of the rewriting for a graph of the model, which is traced anew for every shape.

        Args:
            model: traced at any shapes; its segments are those that are rewritten afterwards.

        Returns:
            The graph, whose `values` are what a rank holds of them, and what rewrites its segments.
        """
        degree = self.auto_sharder.degree
        if degree == 1 or not self.sequence:
            return model, self
        try:
            plan = plan_sequence(model, self.split, degree)
        except ShardError as error:  # of an operator that the planned graph does not have
            warn_once(
                logger,
                "sequence_parallel=True shards no values of a graph that is not the planned one, "
                "such as an evaluation's: %s",
                error,
            )
            return model, replace(self, sequence_plan=None)
        fitted = replace(model, values=plan.local_values(model, degree))
        return fitted, replace(self, sequence_plan=plan)

    def __call__(self, segment: Segment) -> tuple[Segment, dict[str, ParameterShard]]:
        """Rewrite one segment.

        Args:
            segment: of the model, traced at any shapes; left as it is.

        Returns:
            The segment that every rank runs, with the same parameters, inputs and outputs by name;
            and the layout of the parameters that are split.

        Raises:
            ShardError: an operator that cannot be split so.
        """
        degree = self.auto_sharder.degree
        if degree == 1:
            return segment, {}
        split, graph = self.split(segment), segment.graph
        shards = {name: _shard(p, degree) for name, p in split.weights.items()}
        if self.sequence_plan is None:
            local = _rewrite_or_gather(graph, split, degree)
        else:
            layout = self.sequence_plan.segments[segment.index].propagated.propagation
            local = rewrite(graph, layout, degree)
        return replace(segment, graph=local), shards

    def like(self, segment: Segment) -> Hashable:
        """First segment of those whose rewritings differ in names alone.

        Args:
            segment: of the graph that `fit` has seen.
        """
        if self.sequence_plan is not None:
            return self.sequence_plan.segments[segment.index].like
        return self.split(segment).like

    def split(self, segment: Segment) -> SegmentSharding:
        """Sharding of one segment's weights, and the collectives it runs."""
        own = {n: self.weights[n] for n in segment.parameters if n in self.weights}
        task = SegmentTask(segment, own, frozenset(segment.parameters))
        try:
            return self.auto_sharder(task)
        except ShardError as error:  # of an operator that the planned graph does not have
            logger.debug("segment %d gathers what is split: %s", segment.index, error)
            return SegmentSharding(own, frozenset(), (), segment)


def tensor_parallel(
    model: ModelGraph,
    features: Features | None,
    degree: int,
    *,
    sequence: bool = False,
    ep: int = 1,
    auto_sharder: AutoSharder | None = None,
) -> TensorParallel:
    """Sharding of a model's weights: by a feature dict, and automatic for the rest.

    Args:
        model: the traced model.
        features: what is given; the rest is derived from the graph.
        degree: the number of tensor parallel ranks.
        sequence: whether values are sharded over the sequence where they can be.
        ep: the expert parallel degree, that of the tensor parallel ranks; 1 splits every expert.
        auto_sharder: of an earlier call for this model and degree, which knows the segments that
            another ep leaves as they are; None for a new one.

    Returns:
        What rewrites its segments.

    Raises:
        ShardError: the feature dict does not fit the model or the degree, the degree is larger
            than anything that can be split, or experts cannot be split over `ep` ranks.
    """
    if degree == 1:
        return TensorParallel(AutoSharder(model.parameters, degree), {})
    auto_sharder = auto_sharder or AutoSharder(model.parameters, degree)
    attributes = attributes_for(model, features or {})
    given = given_weights(model, attributes, degree)
    replicated = frozenset(n for n, a in attributes.items() if isinstance(a, Replicate))
    if ep > 1:
        given = expert_weights(model, ep, attributes.keys()) | given
    weights = auto_shard(model, auto_sharder, given, replicated)
    if not attributes and not weights.keys() - vocabularies(model):
        check_limits(model, degree)
    return TensorParallel(auto_sharder, weights, sequence)


def auto_tensor_parallel(
    model: ModelGraph, degree: int, *, sequence: bool = False, ep: int = 1
) -> TensorParallel:
    """Automatic sharding of a model's weights; none where the degree is too large."""
    auto_sharder = AutoSharder(model.parameters, degree)
    experts = expert_weights(model, ep, ()) if ep > 1 else {}
    if degree == 1:
        return TensorParallel(auto_sharder, {}, sequence)
    weights = auto_shard(model, auto_sharder, experts, frozenset())
    return TensorParallel(auto_sharder, weights, sequence)


def expert_weights(model: ModelGraph, ep: int, excluded: Collection[str]) -> dict[str, Shard]:
    """Placements of a model's expert weights, each split over its experts.

    Args:
        model: the traced model.
        ep: the expert parallel degree.
        excluded: parameters whose placement is given.

    Returns:
        Placements by name.

    Raises:
        ShardError: there are no experts, the degree does not divide their number, or something else
            reads their weights.
    """
    found: dict[str, Shard] = {}
    refuse_other_readers(model, ep, only_separate=True)
    for segment in model.segments:
        experts = {n: w for n, w in experts_of(segment).items() if n not in excluded}
        for name, weight in experts.items():
            check_experts(name, weight.num_experts, ep)
        if experts:
            own = {name: weight.placed(name, ep) for name, weight in experts.items()}
            search = Search(segment, model.parameters, ep, excluded, own)
            closed = search.close(own)
            found |= {n: p for n, p in closed.items() if isinstance(p, Shard)}
    if not found:
        raise no_experts(model, ep)
    return found


def attributes_for(model: ModelGraph, features: Features) -> dict[str, Attribute]:
    """Attributes of the parameters that a feature dict matches.

    Raises:
        ShardError: a pattern that matches nothing.
    """
    return resolve_features(features, model.parameters, model.tied)


def given_weights(
    model: ModelGraph, attributes: Mapping[str, Attribute], degree: int
) -> dict[str, Shard]:
    """Placements of weights that a feature dict asks for, checked against the graph.

    Args:
        model: the traced model.
        attributes: from `attributes_for`.
        degree: the number of tensor parallel ranks.

    Returns:
        The split parameters.

    Raises:
        ShardError: sizes that the degree does not divide, or an operator that cannot be split so,
            which the sentence names.
    """
    check_degree(model.segments, model.parameters, attributes, degree)
    chosen: dict[str, Shard] = {}
    for segment in model.segments:
        own = place_weights(segment, model.parameters, attributes)
        propagate(segment.graph, own, degree)
        _check_shared(segment, own, chosen)
        chosen |= own
    return chosen


def check_features(model: ModelGraph, features: Features) -> None:
    """Refuse a feature dict that fits a model under no degree.

    Raises:
        ShardError: a pattern that matches nothing, or an operator that cannot be split so.
    """
    given_weights(model, attributes_for(model, features), 1)


def check_degree(
    segments: Iterable[Segment],
    parameters: Mapping[str, TensorMeta],
    attributes: Mapping[str, Attribute],
    degree: int,
) -> None:
    """Check that a degree divides the heads, kv-heads, feed-forward units … of all split layers.

    Args:
        segments: the segments to check.
        parameters: what every parameter is, by name.
        attributes: from `attributes_for`.
        degree: the number of tensor parallel ranks.

    Raises:
        ShardError: it does not; the sentence names the first layer, its size, and the degrees that
            fit all the segments. Or the layers cannot be split so under any degree.
    """
    found: dict[str, int] = {}
    for segment in segments:
        weights = place_weights(segment, parameters, attributes)
        found |= capacities(propagate(segment.graph, weights, 1))
    found = {n: c for n, c in found.items() if not isinstance(attributes[n], Vocabulary)}
    for name, capacity in found.items():
        if capacity % degree:
            attribute = attributes[name]
            assert isinstance(attribute, (Column, Row))
            raise ShardError(
                f"tp={degree} does not divide the {capacity} {attribute.size} of "
                f"{name.rpartition('.')[0] or name}; the degrees that fit this model are "
                f"{_listed(sympy.divisors(math.gcd(*found.values())))}."
            )


def _rewrite_or_gather(graph: fx.Graph, split: SegmentSharding, degree: int) -> fx.Graph:
    """Graph that every rank runs, whatever its operators can do with shards.

    Weights are split as the planned graph has them. An evaluation returns more than a training step
    and runs other code, which may work on whole values alone: these are gathered; where that does
    not do, the segment's weights are.

    Raises:
        ShardError: an operator needs what one rank alone has.
    """
    errors = []
    for rule in (decide_or_gather, decide_or_gather_parts, gather_operands):
        inside = frozenset[fx.Node]() if rule is gather_operands else split.inside
        try:
            local = rewrite(graph, propagate(graph, split.weights, degree, rule, inside), degree)
        except ShardError as error:
            errors.append(error)
            continue
        if rule is gather_operands:
            warn_once(
                logger,
                "Every rank runs a part of the model on whole weights, which it gathers, in a "
                "graph that is not the planned one, such as an evaluation's: %s",
                errors[0],
            )
        return local
    raise errors[0]


def _shard(placed: WeightPlacement, degree: int) -> ParameterShard:
    if isinstance(placed, PartlySharded):
        return ParameterShard(placed.dim, placed.parts, degree, tuple(sorted(placed.whole)))
    return ParameterShard(
        placed.dim, placed.parts, degree, owner=placed.owner, copies=placed.copies
    )


def _check_shared(segment: Segment, own: WeightPlacements, chosen: WeightPlacements) -> None:
    """Check that segments that share a parameter shard it in one way."""
    for name in segment.parameters:
        if name in own and chosen.get(name, own[name]) != own[name]:
            raise ShardError(
                f"{name} is shared by several layers, which use it in different ways; give it "
                "Replicate() in the feature dict."
            )


def _listed(numbers: Sequence[int]) -> str:
    *head, last = (str(n) for n in numbers)
    return f"{', '.join(head)} and {last}" if head else last
