"""What a stage runs in halves of a microbatch: segments, halved and cut at their all-reduces."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

import torch
from torch import fx

from merak.core.errors import ShardError
from merak.engine.program import (
    HalfProgram,
    HalvedRun,
    HalvedSegment,
    PieceProgram,
    Rewrite,
    Run,
    SegmentProgram,
)
from merak.graph.halves import halve
from merak.graph.ir import Segment
from merak.graph.pieces import cut_at_sums, returned_names

logger = logging.getLogger(__name__)


def arrange_in_halves(
    batch_size: int,
    segments: Sequence[Segment],
    programs: Sequence[SegmentProgram],
    rewrites: Sequence[Rewrite],
    leaving: frozenset[str],
) -> tuple[Run, ...]:
    """The order of work of a stage: what can be halved runs in halves, the rest whole.

    Args:
        batch_size: samples of a microbatch.
        segments: of the stage, as traced.
        programs: the same as they run for a whole microbatch.
        rewrites: what is done in turn to the segments of the stage.
        leaving: values that leave the stage.
    """
    halved: dict[int, HalvedSegment] = {}
    for segment, program in zip(segments, programs, strict=True):
        try:
            halved[segment.index] = halve_segment(segment, program, batch_size, rewrites)
        except ShardError as error:
            logger.info("segment %d (%s) is not halved: %s", segment.index, segment.name, error)
    return group_runs(programs, halved, leaving)


def halve_segment(
    segment: Segment, whole: SegmentProgram, batch_size: int, rewrites: Sequence[Rewrite]
) -> HalvedSegment:
    """Compile a segment in halves.

    Args:
        segment: as traced.
        whole: the same as it runs for a whole microbatch.
        batch_size: samples of a microbatch.
        rewrites: what is done in turn to the segments of its stage.

    Raises:
        ShardError: an odd number of samples, or an operator that does not treat them one by one.
    """
    halves = halve(segment, batch_size)
    first, second = (_compile(half, rewrites) for half in halves.segments)
    return HalvedSegment(whole, (first, second), halves.dims)


def _compile(segment: Segment, rewrites: Sequence[Rewrite]) -> HalfProgram:
    for rewrite in rewrites:
        segment, _ = rewrite(segment)
    pieces = tuple(
        PieceProgram(piece.segment, _function(piece.segment.graph), piece.crossings)
        for piece in cut_at_sums(segment)
    )
    return HalfProgram(pieces, tuple(zip(segment.outputs, returned_names(segment), strict=True)))


def _function(graph: fx.Graph) -> Callable[..., tuple[torch.Tensor, ...]]:
    return fx.GraphModule(torch.nn.Module(), graph).forward


def group_runs(
    programs: Sequence[SegmentProgram],
    halved: Mapping[int, HalvedSegment],
    leaving: frozenset[str],
) -> tuple[Run, ...]:
    """The order of work of a stage: segments that run whole, and runs of those in halves.

    Args:
        programs: the stage's segments.
        halved: those that run in halves, by their index.
        leaving: values that leave the stage.
    """
    runs: list[Run] = []
    for is_halved, group in groupby(programs, key=lambda p: p.segment.index in halved):
        own = tuple(group)
        if is_halved:
            runs.append(_run(own, programs, halved, leaving))
        else:
            runs.extend(own)
    return tuple(runs)


def _run(
    own: Sequence[SegmentProgram],
    programs: Sequence[SegmentProgram],
    halved: Mapping[int, HalvedSegment],
    leaving: frozenset[str],
) -> HalvedRun:
    inside = {p.segment.index for p in own}
    others = [p.segment for p in programs if p.segment.index not in inside]
    read = leaving | {name for segment in others for name in segment.inputs}
    segments = tuple(halved[p.segment.index] for p in own)
    made = {name for p in own for name in p.segment.outputs}
    return HalvedRun(
        segments=segments,
        inputs={
            name: segment.dims.get(name)
            for segment in segments
            for name in segment.whole.segment.inputs
            if name not in made
        },
        outputs={
            name: segment.dims[name]
            for segment in segments
            for name in segment.whole.segment.outputs
            if name in read
        },
    )
