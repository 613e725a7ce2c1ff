"""Sub-pipelined programs: a stage's segments split into sub-microbatches and pieces."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, islice

from merak.core.errors import ShardError
from merak.core.rank0 import warn_on_rank0
from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import Segment, returned_nodes
from merak.graph.program.program import (
    Compiler,
    Rewrite,
    SegmentProgram,
    StageItem,
    SubPipelinedRun,
    SubPipelinedSegment,
)
from merak.graph.sub_pipelining.leading_part import leading_cuts
from merak.graph.sub_pipelining.sub_microbatch import (
    SampleDims,
    same_operators,
    split_segment,
    sub_microbatches,
)
from merak.ops import collectives

logger = logging.getLogger(__name__)

SubPipelinedPart = SegmentProgram | SubPipelinedSegment
"""One thing to run, whole or in sub-microbatches."""

_MOST_CUTS = 4
"""Places to cut a segment that are tried."""


def arrange_sub_pipelined(
    samples: SampleDims,
    compiler: Compiler,
    segments: Sequence[Segment],
    programs: Sequence[SegmentProgram],
    rewrites: Sequence[Rewrite],
    leaving: frozenset[str],
) -> tuple[StageItem, ...]:
    """Stage items of which those that can be split run in sub-microbatches.

    Args:
        samples: of a microbatch.
        compiler: of the segments.
        segments: of the stage, as traced.
        programs: the same as they run for a whole microbatch.
        rewrites: what is done in turn to the segments of the stage.
        leaving: values that leave the stage.
    """
    try:
        sub_microbatches(samples.batch_size)
    except ShardError as error:
        warn_on_rank0(logger, "%s", error)
        return tuple(programs)
    parts: list[SubPipelinedPart] = []
    for segment, program in zip(segments, programs, strict=True):
        try:
            parts.append(sub_pipeline_segment(segment, program, samples, rewrites, compiler))
        except ShardError as error:
            cut = _cut(segment, program, samples, rewrites, compiler)
            parts.extend(cut or (program,))
            what = "only its first part runs" if cut else "it does not run"
            logger.info(
                "segment %d (%s): %s in sub-microbatches: %s",
                segment.index,
                segment.name,
                what,
                error,
            )
    return group_runs(parts, leaving)


def _cut(
    segment: Segment,
    whole: SegmentProgram,
    samples: SampleDims,
    rewrites: Sequence[Rewrite],
    compiler: Compiler,
) -> tuple[SubPipelinedSegment, SegmentProgram] | None:
    """Leading part of a segment in sub-microbatches, and its rest; None where that does not pay.

    It pays where the first part has sums to hide and the cut adds none.
    """
    for parts in islice(leading_cuts(segment, samples), _MOST_CUTS):
        try:
            own = compiler.extended(_values(parts[0]))
            first, rest = (
                replace(own.segment(part, rewrites, whole.keeps)[0], saved=whole.saved)
                for part in parts
            )
            if 0 < _num_collectives(first) <= _num_collectives(whole) - _num_collectives(rest):
                return sub_pipeline_segment(parts[0], first, samples, rewrites, own), rest
        except ShardError:
            continue
    return None


def _values(part: Segment) -> dict[str, TensorMeta]:
    returned = zip(part.outputs, returned_nodes(part.graph), strict=True)
    return {name: node.meta["tensor"] for name, node in returned}


def _num_collectives(program: SegmentProgram) -> int:
    module = collectives.__name__
    return sum(getattr(n.target, "__module__", "") == module for n in program.segment.graph.nodes)


def sub_pipeline_segment(
    segment: Segment,
    whole: SegmentProgram,
    samples: SampleDims,
    rewrites: Sequence[Rewrite],
    compiler: Compiler,
) -> SubPipelinedSegment:
    """Program of a segment in sub-microbatches.

    Args:
        segment: as traced.
        whole: the same as it runs for a whole microbatch.
        samples: of a microbatch.
        rewrites: what is done in turn to the segments of its stage.
        compiler: of its sub-microbatches.

    Raises:
        ShardError: a single sample, an operator that does not treat them one by one, or a backward
            that is no graph.
    """
    split = split_segment(segment, samples)
    first, second = (compiler.segment(one, rewrites, yields=True)[0] for one in split.segments)
    if whole.keeps:
        keeps = same_operators(whole.segment.graph, first.segment.graph, whole.keeps)
        first, second = (
            compiler.segment(one, rewrites, keeps, yields=True)[0] for one in split.segments
        )
    if first.joint is None or second.joint is None:
        raise ShardError("autograd runs its backward, in one piece.")
    draws, saved = whole.draws, whole.saved  # of what was traced
    programs = (
        replace(first, draws=draws, saved=saved),
        replace(second, draws=draws, saved=saved),
    )
    return SubPipelinedSegment(whole, programs, split.sub_microbatches, split.dims)


def group_runs(parts: Sequence[SubPipelinedPart], leaving: frozenset[str]) -> tuple[StageItem, ...]:
    """Stage items in order: full segments, and runs of sub-pipelined ones.

    Args:
        parts: of the stage, in order.
        leaving: values that leave the stage.
    """
    runs: list[StageItem] = []
    for is_split, group in groupby(parts, key=lambda part: isinstance(part, SubPipelinedSegment)):
        own = tuple(group)
        if is_split:
            runs.append(_run(own, parts, leaving))
        else:
            runs.extend(part for part in own if isinstance(part, SegmentProgram))
    return tuple(runs)


def _run(
    own: Sequence[SubPipelinedPart], parts: Sequence[SubPipelinedPart], leaving: frozenset[str]
) -> SubPipelinedRun:
    inside = {id(part) for part in own}
    others = [_whole(part) for part in parts if id(part) not in inside]
    read = leaving | {name for whole in others for name in whole.segment.inputs}
    segments = tuple(part for part in own if isinstance(part, SubPipelinedSegment))
    made = {name for part in segments for name in part.whole.segment.outputs}
    return SubPipelinedRun(
        segments=segments,
        inputs={
            name: segment.dims.get(name)
            for segment in segments
            for name in segment.whole.segment.inputs
            if name not in made
        },
        outputs={
            name: segment.dims.get(name)
            for segment in segments
            for name in segment.whole.segment.outputs
            if name in read
        },
    )


def _whole(part: SubPipelinedPart) -> SegmentProgram:
    return part.whole if isinstance(part, SubPipelinedSegment) else part
