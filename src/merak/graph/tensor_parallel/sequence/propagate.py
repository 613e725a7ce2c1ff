"""Sequence parallelism: values outside sharded products are sharded over the sequence.

A rule in front of those of tensor parallelism. A value that is sharded over tokens stays so through
every operator that treats the tokens one by one, which the same rules decide; it is gathered where
an operator works on sharded weights or must see all tokens. Partial sums and replicated values are
sharded where `landing` has them, for those of their readers that can work on shards.

Source: Korthikanti et al. (arXiv 2205.05198, section 4.2.2).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from torch import fx

from merak.core.errors import ShardError
from merak.graph.ir.mutation import is_mutating, mutated_arguments
from merak.graph.ir.operators import family, weights_only
from merak.graph.tensor_parallel.placement import (
    PARTIAL,
    REPLICATE,
    REPLICATE_PARTIAL_GRAD,
    Decision,
    ExpertRows,
    Operator,
    PartlySharded,
    Placement,
    ResultPlacement,
    Shard,
    shape_of,
)
from merak.graph.tensor_parallel.propagate import (
    Propagation,
    decide_or_gather,
    propagate_once,
    reduce_early,
)
from merak.graph.tensor_parallel.rules.rules import decide
from merak.graph.tensor_parallel.search.auto_shard import SegmentSharding
from merak.graph.tensor_parallel.search.cost import has_gradient

Landing = Mapping[fx.Node, Shard]


@dataclass(frozen=True, slots=True)
class SequenceChoice:
    """Choice of how one segment runs on shards of the sequence.

    Args:
        inside: operators on whole values to count to the work that is split.
        landing: sums and whole values that become sharded, and which.
        whole: inputs that are sharded, and are gathered for everything that reads them.
    """

    inside: frozenset[fx.Node] = frozenset()
    landing: Landing = field(default_factory=dict)
    whole: frozenset[fx.Node] = frozenset()


@dataclass(frozen=True, slots=True)
class SequencePropagation:
    """Propagation of a segment's placements under a choice.

    Args:
        propagation: their placements.
        sharded: those that are sharded over the sequence, landed ones aside.
    """

    propagation: Propagation
    sharded: frozenset[fx.Node]


def propagate_sequence(
    graph: fx.Graph,
    split: SegmentSharding,
    entering: Mapping[fx.Node, Shard],
    choice: SequenceChoice,
    degree: int,
    leaving: Collection[fx.Node],
) -> SequencePropagation:
    """Propagate the placements of weights and of the sequence through a segment.

    Args:
        graph: the segment's operators.
        split: how its weights are split.
        entering: the values of other segments that are sharded.
        choice: where values become sharded, and what is gathered where it enters.
        degree: the number of ranks.
        leaving: results that may leave sharded.

    Raises:
        ShardError: an operator that cannot work so.
    """
    alone, weights = weights_only(graph), split.weights
    rules: list[_SequenceRule] = []

    def run(reduced: Collection[fx.Node]) -> Propagation:
        rules.append(_SequenceRule(alone, entering.keys() - choice.whole, choice))
        return propagate_once(graph, weights, degree, rules[-1], choice.inside, entering, reduced)

    propagated = reduce_early(graph, run)
    rule = rules[-1]
    outputs: dict[fx.Node, Placement] = {}
    for node in leaving:
        placed = choice.landing.get(node)
        if node in rule.sharded or node in choice.whole:
            placed = _one(propagated.placements[node])
        if placed is not None:
            outputs[node] = placed
    return SequencePropagation(
        replace(propagated, outputs=outputs, scatters=True), frozenset(rule.sharded)
    )


def _one(placed: ResultPlacement) -> Shard:
    assert isinstance(placed, Shard)
    return placed


class _SequenceRule:
    """Sharding rule for operators of which some operands are sharded over the sequence.

    Args:
        weights: values that depend on parameters alone.
        entering: inputs that are sharded.
        choice: what becomes sharded, and what is gathered.
    """

    def __init__(
        self, weights: Collection[fx.Node], entering: Collection[fx.Node], choice: SequenceChoice
    ) -> None:
        self.weights = weights
        self.landing = choice.landing
        self.gathered = choice.whole
        self.sharded = set(entering)

    def __call__(self, op: Operator) -> Decision:
        if family(op.node.target) == "getitem":
            if op.node.args[0] in self.sharded:
                self.sharded.add(op.node)
            return decide(op)
        operands = op.node.all_input_nodes
        own = {n: op.placements[n] for n in operands if n in self.sharded or n in self.gathered}
        landed: dict[fx.Node, ResultPlacement] = {}
        if not is_mutating(op.node):
            landed = {n: self.landing[n] for n in operands if n in self.landing}
        if not own and (not landed or decide_or_gather(op).output == PARTIAL):
            return decide_or_gather(op)
        if not op.in_split_work and not self.gathered.intersection(own):
            decision = self._on_shards(op, {**own, **landed}, landed)
            if decision is not None:
                return decision
        return self._on_whole(op, own)

    def _on_shards(
        self,
        op: Operator,
        split: Mapping[fx.Node, ResultPlacement],
        landed: Mapping[fx.Node, ResultPlacement],
    ) -> Decision | None:
        """Decision on each rank's own tokens; None where the operator must see them all."""
        operands = [n for n in op.node.all_input_nodes if n not in split]
        if any(isinstance(op.raw(n), (Shard, PartlySharded, ExpertRows)) for n in operands):
            return None  # work on split weights
        try:
            decision = decide(op.placed_as(landed))
        except ShardError:
            return None
        needs = {n: p for n, p in landed.items() if isinstance(p, Shard)} | dict(decision.needs)
        if decision.output == REPLICATE or self._is_slow(op, split, needs):
            return None
        if decision.output != PARTIAL:
            self.sharded.add(op.node)
        return replace(decision, needs=needs)

    def _is_slow(
        self, op: Operator, split: Collection[fx.Node], needs: Mapping[fx.Node, Placement]
    ) -> bool:
        """Whether all-reduces of weight gradients outweigh gathering the shards."""
        whole = [n for n in op.node.all_input_nodes if n not in split and n in self.weights]
        summed = [n for n in whole if op.raw(n) == REPLICATE and has_gradient(n)]
        summed = [
            n for n in summed if needs.get(n, REPLICATE_PARTIAL_GRAD) == REPLICATE_PARTIAL_GRAD
        ]
        gathered = max((math.prod(shape_of(n)) for n in split), default=0)
        return 2 * sum(math.prod(shape_of(n)) for n in summed) > gathered

    def _on_whole(self, op: Operator, own: Mapping[fx.Node, ResultPlacement]) -> Decision:
        """Decision on gathered operands."""
        if any(written in own for written in mutated_arguments(op.node)):
            raise op.error("writes into a value that is sharded over the sequence")
        decision = decide_or_gather(op.placed_as(dict.fromkeys(own, REPLICATE)))
        need = REPLICATE if decision.output == REPLICATE else REPLICATE_PARTIAL_GRAD
        needs: dict[fx.Node, Placement] = dict.fromkeys(own, need)
        return replace(decision, needs={**needs, **decision.needs})
