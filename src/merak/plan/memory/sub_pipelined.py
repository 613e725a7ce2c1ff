"""Memory of segments that run as two sub-microbatches, read off the joint graphs of both."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from merak.core.errors import ShardError
from merak.graph.ir.ir import ModelGraph, Segment, batch_size
from merak.graph.ir.structure import structure_of_graph
from merak.graph.joint.segment import joint_obstacle
from merak.graph.program.program import Rewrite, StageProgram
from merak.graph.sub_pipelining.sub_microbatch import (
    SampleDims,
    find_sample_dims,
    same_operators,
    split_segment,
)
from merak.plan.cost.segments.measured import values_of
from merak.plan.cost.segments.memory import SegmentMemory
from merak.plan.memory.measured import Measured


@dataclass(frozen=True, slots=True)
class Pair:
    """What the sub-microbatches of a segment run.

    Args:
        segments: of each.
        whole: inputs and outputs that have no samples, which both read or make whole.
    """

    segments: tuple[Segment, Segment]
    whole: frozenset[str]


class SplitSegments:
    """Splits the segments of a model into sub-microbatches; equal ones once.

    Args:
        whole: the model at one microbatch, as traced.
        graph: the same as a tensor parallel rank's rewrites take it.
        rewrites: of its segments.
    """

    def __init__(self, whole: ModelGraph, graph: ModelGraph, rewrites: Sequence[Rewrite]) -> None:
        self._whole = whole
        self._graph = graph
        self._rewrites = rewrites
        self._samples: SampleDims | None = None
        self._known: dict[object, tuple[Segment, Pair | None]] = {}

    def stage(
        self,
        stage: StageProgram,
        measured: Measured,
        known: Mapping[int, SegmentMemory],
        immediate: Collection[str] = (),
        keeps: Mapping[int, frozenset[str]] = MappingProxyType({}),
    ) -> dict[int, SegmentMemory]:
        """Memory of the segments of a stage that run in sub-microbatches.

        Args:
            stage: its programs, for a whole microbatch.
            measured: measures them.
            known: memory of all segments for a whole microbatch.
            immediate: names of parameters whose gradients are never left for later.
            keeps: by segment, names of the operators whose results are kept where others are
                recomputed.
        """
        found = {s.segment.index: self._split(s.segment) for s in stage.segments if s.trains}
        memories = {}
        for own in stage.segments:
            index = own.segment.index
            first, pair = found.get(index, (own.segment, None))
            if pair is None:
                continue
            runs_whole = [n for n in known if found.get(n, (None, None))[1] is None]
            read = {*stage.sent, *stage.results.values(), *_read_whole(stage, runs_whole, index)}
            names = dict(zip(own.segment.outputs, first.outputs, strict=True))
            joined = tuple(names[name] for name in own.segment.outputs if name in read)
            params = zip(own.segment.parameters, first.parameters, strict=True)
            now = tuple(same for name, same in params if name in immediate)
            graph = pair.segments[0].graph
            kept = same_operators(own.segment.graph, graph, keeps.get(index, ()))
            memory = measured.in_turns(first, pair.segments, now, joined, kept)
            if memory is None:
                continue
            own_names = values_of(first, own.segment)
            whole = frozenset(own_names[name] for name in pair.whole)
            memories[index] = replace(
                memory.renamed(own_names),
                outputs={
                    name: replace(made, num_bytes=(1 + (name in whole)) * made.num_bytes)
                    for name, made in known[index].outputs.items()
                },
                read_whole=whole.intersection(own.segment.inputs),
                recomputed=known[index].recomputed,
            )
        return memories

    def _split(self, segment: Segment) -> tuple[Segment, Pair | None]:
        """A segment that is alike, in sub-microbatches; None for these where it runs whole."""
        whole = self._graph.segments[segment.index]
        key = structure_of_graph(whole.graph)
        if key not in self._known:
            if self._samples is None:
                size = batch_size(self._whole)
                self._samples = find_sample_dims(self._whole.segments, size)
            try:
                split = split_segment(whole, self._samples)
                first, second = map(self._local, split.segments)
                every = frozenset((*segment.inputs, *segment.outputs))
                self._known[key] = segment, Pair((first, second), every - split.dims.keys())
            except ShardError:
                self._known[key] = segment, None
        return self._known[key]

    def _local(self, half: Segment) -> Segment:
        for rewrite in self._rewrites:
            half, _ = rewrite(half)
        if obstacle := joint_obstacle(half.graph):
            raise ShardError(obstacle)
        return half


def _read_whole(stage: StageProgram, whole: Collection[int], index: int) -> frozenset[str]:
    """Values that segments outside a segment's run read whole."""
    numbers = [own.segment.index for own in stage.segments]
    ends = next((n for n in numbers if n > index and n in whole), max(numbers) + 1)
    later = (own.segment for own in stage.segments if own.segment.index >= ends)
    return frozenset(name for segment in later for name in segment.inputs)
