"""Memory of segments that run as two sub-microbatches, piece by piece.

A piece has an autograd graph of its own, so both its inputs and its outputs are held, and an
all-reduce gets a copy of what it sums. The pieces of both sub-microbatches run in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from merak.core.errors import ShardError
from merak.graph.ir.ir import Kind, ModelGraph, Segment, batch_size
from merak.graph.ir.structure import structure_of_graph
from merak.graph.program.program import (
    PieceProgram,
    Rewrite,
    SegmentProgram,
    StageProgram,
    SubMicrobatchProgram,
    SubPipelinedSegment,
)
from merak.graph.program.sub_pipelined import sub_pipeline_segment
from merak.graph.sub_pipelining.sub_microbatch import SampleDims, find_sample_dims
from merak.plan.cost.segments.memory import BackwardMemory, SegmentMemory

Measure = Callable[[Segment], SegmentMemory]


@dataclass(frozen=True, slots=True)
class SplitMemory:
    """Bytes of a segment in sub-microbatches, in place of those of `SegmentMemory`.

    Args:
        saved_bytes: as there.
        forward_bytes: as there.
        saving_forward_bytes: as there.
        first_backward_bytes: as there.
        backward_bytes: as there.
        held_outputs: by place among the outputs, bytes of what both sub-microbatches hold of it for
            their backwards, beside the whole where others read that.
    """

    saved_bytes: int
    forward_bytes: int
    saving_forward_bytes: int
    first_backward_bytes: int
    backward_bytes: int
    held_outputs: tuple[int, ...]


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
        self._known: dict[object, SplitMemory | None] = {}

    def stage(
        self, stage: StageProgram, measure: Measure, known: dict[int, SegmentMemory]
    ) -> dict[int, SegmentMemory]:
        """Memory of the segments of a stage that run in sub-microbatches.

        Args:
            stage: its programs, for a whole microbatch.
            measure: the memory of a segment or piece.
            known: memory of all segments for a whole microbatch.
        """
        found = {own.segment.index: self._split(own, measure) for own in stage.segments}
        memories = {}
        for own in stage.segments:
            split, index = found[own.segment.index], own.segment.index
            if split is None:
                continue
            read = {*stage.sent, *stage.results.values(), *_read_whole(stage, found, index)}
            outputs = zip(own.segment.outputs, split.held_outputs, strict=True)
            beside = sum(num_bytes for name, num_bytes in outputs if name in read)
            memories[index] = replace(
                known[index],
                saved_bytes=split.saved_bytes + beside,
                saved_outputs=frozenset(own.segment.outputs),
                forward_bytes=split.forward_bytes,
                saving_forward_bytes=split.saving_forward_bytes + beside,
                recompute_bytes=split.saving_forward_bytes + beside,
                whole=BackwardMemory(split.first_backward_bytes, split.backward_bytes),
                recomputed=None,
            )
        return memories

    def _split(self, program: SegmentProgram, measure: Measure) -> SplitMemory | None:
        """Memory of a segment in sub-microbatches; None where it runs whole."""
        segment = self._graph.segments[program.segment.index]
        key = structure_of_graph(segment.graph)
        if key not in self._known:
            if self._samples is None:
                size = batch_size(self._whole)
                self._samples = find_sample_dims(self._whole.segments, size)
            try:
                split = sub_pipeline_segment(segment, program, self._samples, self._rewrites)
                self._known[key] = _memory_of(split, measure)
            except ShardError:
                self._known[key] = None
        return self._known[key]


def _read_whole(
    stage: StageProgram, found: dict[int, SplitMemory | None], index: int
) -> frozenset[str]:
    """Values that segments outside a segment's run read whole."""
    numbers = [own.segment.index for own in stage.segments]
    ends = next((n for n in numbers if n > index and found[n] is None), max(numbers) + 1)
    later = (own.segment for own in stage.segments if own.segment.index >= ends)
    return frozenset(name for segment in later for name in segment.inputs)


def _memory_of(split: SubPipelinedSegment, measure: Measure) -> SplitMemory:
    sub_microbatches = [_SubMicrobatchMemory(program, split, measure) for program in split.programs]
    saved_bytes = sum(one.held_bytes - one.returned_bytes for one in sub_microbatches)
    given_bytes = sum(one.returned_bytes for one in sub_microbatches)
    first, later = (_backward_bytes(sub_microbatches, is_first) for is_first in (True, False))
    return SplitMemory(
        saved_bytes=saved_bytes,
        forward_bytes=sum(one.passed_bytes for one in sub_microbatches)
        + max(one.plain_bytes for one in sub_microbatches),
        saving_forward_bytes=saved_bytes
        + given_bytes
        + max(one.temporary_bytes for one in sub_microbatches),
        first_backward_bytes=first,
        backward_bytes=later,
        held_outputs=tuple(
            map(sum, zip(*(one.held_outputs for one in sub_microbatches), strict=True))
        ),
    )


@dataclass(slots=True)
class _SubMicrobatchMemory:
    """Bytes of one sub-microbatch of a segment.

    Args:
        program: its pieces.
        split: of the segment.
        measure: the memory of a piece.
    """

    program: SubMicrobatchProgram
    split: SubPipelinedSegment
    measure: Measure
    pieces: tuple[tuple[PieceProgram, SegmentMemory], ...] = field(init=False)
    sizes: dict[str, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.pieces = tuple((own, self.measure(own.segment)) for own in self.program.pieces)
        for piece, _ in self.pieces:
            for node in piece.segment.graph.find_nodes(op="placeholder"):
                if node.meta["kind"] is Kind.VALUE:
                    self.sizes[node.meta["name"]] = node.meta["tensor"].num_bytes
        for _, memory in self.pieces:
            self.sizes |= {name: out.num_bytes for name, out in memory.outputs.items()}
        for piece, _ in self.pieces:
            for own in piece.all_reduces:  # of a value, or of one that only later pieces read
                known = self.sizes.get(own.source, self.sizes.get(own.result, 0))
                self.sizes[own.source] = self.sizes[own.result] = known

    @property
    def copies(self) -> dict[str, int]:
        """What forward all-reduces have summed."""
        every = (own for piece, _ in self.pieces for own in piece.all_reduces)
        return {own.result: self.sizes[own.source] for own in every if own.in_forward}

    @property
    def own(self) -> dict[str, int]:
        """Outputs of pieces in storages of their own."""
        every = (item for _, memory in self.pieces for item in memory.outputs.items())
        return {name: out.num_bytes for name, out in every if out.root == name}

    @property
    def passed_bytes(self) -> int:
        """What its pieces and all-reduces have made, when all have run."""
        return sum(self.own.values()) + sum(self.copies.values())

    @property
    def held_bytes(self) -> int:
        """What it holds for the backward, its outputs included."""
        return self.passed_bytes + sum(memory.saved_bytes for _, memory in self.pieces)

    @property
    def returned_bytes(self) -> int:
        """Of that, outputs of the segment."""
        made = {**self.own, **self.copies}
        return sum(made.get(name, 0) for name in {found for _, found in self.program.returned})

    @property
    def held_outputs(self) -> list[int]:
        """Bytes of each output that a piece holds; an all-reduced one is held by its readers."""
        own = self.own
        return [own.get(found, 0) for _, found in self.program.returned]

    @property
    def temporary_bytes(self) -> int:
        """The most that a forward which saves takes beyond what is left of it."""
        return max(
            (m.saving_forward_bytes - m.saved_bytes - m.own_bytes for _, m in self.pieces),
            default=0,
        )

    @property
    def plain_bytes(self) -> int:
        """The same of a forward that saves nothing."""
        return max((m.forward_bytes - m.own_bytes for _, m in self.pieces), default=0)


def _backward_bytes(sub_microbatches: Sequence[_SubMicrobatchMemory], is_first: bool) -> int:
    """Peak of the backward beyond its start, with both sub-microbatches in turn."""
    live, peak = 0, 0
    gradients: list[dict[str, int]] = [{} for _ in sub_microbatches]
    accumulated: set[str] = set()
    for number in reversed(range(max(len(one.pieces) for one in sub_microbatches))):
        for one, own in zip(sub_microbatches, gradients, strict=True):
            if number >= len(one.pieces):
                continue
            piece, memory = one.pieces[number]
            copied = [c for c in piece.all_reduces if not c.in_forward and c.result in own]
            peak = max(peak, live + max((own[c.result] for c in copied), default=0))
            for crossing in piece.all_reduces:
                if crossing.result in own:
                    num_bytes = own.pop(crossing.result)
                    live -= num_bytes if crossing.source in own else 0
                    own[crossing.source] = num_bytes
            new = _trained(piece.segment)
            is_new = is_first and not accumulated.issuperset(new)
            taken = memory.whole.first_bytes if is_new else memory.whole.later_bytes
            peak = max(peak, live + taken)
            if is_new:
                fresh = new.keys() - accumulated
                live += sum(new[name] for name in fresh)
                accumulated |= fresh
            for name, num_bytes in _gradient_inputs(piece.segment).items():
                live += 0 if name in own else num_bytes
                own[name] = num_bytes
            live -= sum(own.pop(name, 0) for name in piece.segment.outputs)
            live -= memory.saved_bytes + memory.own_bytes
    return peak


def _trained(segment: Segment) -> dict[str, int]:
    """Bytes of the gradients of a piece's parameters."""
    return _requiring(segment, Kind.PARAMETER)


def _gradient_inputs(segment: Segment) -> dict[str, int]:
    """Bytes of the gradients of a piece's inputs."""
    return _requiring(segment, Kind.VALUE)


def _requiring(segment: Segment, kind: Kind) -> dict[str, int]:
    nodes = segment.graph.find_nodes(op="placeholder")
    return {
        node.meta["name"]: node.meta["tensor"].num_bytes
        for node in nodes
        if node.meta["kind"] is kind and node.meta["tensor"].requires_grad
    }
