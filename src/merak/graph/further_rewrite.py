"""Rewritings of a rank's segments behind the one that shares their work among ranks."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

from torch import fx

from merak.core.shards import ParameterShard
from merak.graph.ir.ir import ModelGraph, Segment


class SegmentRewrite(Protocol):
    """What makes a model's segments those of one rank."""

    def fit(self, model: ModelGraph) -> tuple[ModelGraph, Any]:
        """Plan of the rewriting for a graph of the model, which is traced anew for every shape.

        Args:
            model: traced at any shapes; its segments are those that are rewritten afterwards.

        Returns:
            The graph, whose `values` are what a rank holds of them, and what rewrites its segments.
        """

    def __call__(self, segment: Segment) -> tuple[Segment, dict[str, ParameterShard]]:
        """Rewrite one segment of the graph that `fit` has seen.

        Args:
            segment: of the model; left as it is.

        Returns:
            The segment that every rank runs, and the layout of its parameters.
        """

    def like(self, segment: Segment) -> Hashable:
        """Key of a segment's rewriting: segments with equal keys differ in names alone.

        Args:
            segment: of the graph that `fit` has seen.
        """


@dataclass(frozen=True, slots=True, eq=False)
class FurtherRewrite:
    """A `SegmentRewrite` that changes operators of what another one gives.

    Args:
        within: that one; None where segments are whole.
    """

    within: SegmentRewrite | None

    def changed(self, segment: Segment) -> fx.Graph | None:
        """Graph in the place of a segment's, as a rank runs it; None where nothing changes."""
        raise NotImplementedError

    def fit(self, model: ModelGraph) -> tuple[ModelGraph, Self]:
        """Plan as of `SegmentRewrite`."""
        if self.within is None:
            return model, self
        graph, within = self.within.fit(model)
        return graph, replace(self, within=within)

    def __call__(self, segment: Segment) -> tuple[Segment, dict[str, ParameterShard]]:
        """Rewrite as of `SegmentRewrite`."""
        own, shards = (segment, {}) if self.within is None else self.within(segment)
        graph = self.changed(own)
        return (own if graph is None else replace(own, graph=graph)), shards

    def like(self, segment: Segment) -> Hashable:
        """Key as of `SegmentRewrite`."""
        return segment if self.within is None else self.within.like(segment)
