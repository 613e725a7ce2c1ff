"""Sub-pipelined programs: a stage's segments split into sub-microbatches and pieces."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby, islice

import torch
from torch import fx

from merak.core.errors import ShardError
from merak.core.rank0 import warn_on_rank0
from merak.graph.ir.ir import Segment, returned_nodes
from merak.graph.program.logical_draws import draw_in_logical_order
from merak.graph.program.program import (
    PieceProgram,
    Rewrite,
    SegmentProgram,
    StageItem,
    SubMicrobatchProgram,
    SubPipelinedRun,
    SubPipelinedSegment,
    compile_segment,
    has_draws,
)
from merak.graph.segment.cut import copy_graph
from merak.graph.sub_pipelining.leading_part import leading_cuts
from merak.graph.sub_pipelining.pieces import cut_at_all_reduces, returned_names
from merak.graph.sub_pipelining.sub_microbatch import SampleDims, split_segment, sub_microbatches
from merak.graph.trace.branches.flags import is_condition
from merak.graph.trace.branches.outcomes import BranchValues, specialize_branches
from merak.ops import collectives

logger = logging.getLogger(__name__)

SubPipelinedPart = SegmentProgram | SubPipelinedSegment
"""One thing to run, whole or in sub-microbatches."""

_MOST_CUTS = 4
"""Places to cut a segment that are tried."""


def arrange_sub_pipelined(
    samples: SampleDims,
    segments: Sequence[Segment],
    programs: Sequence[SegmentProgram],
    rewrites: Sequence[Rewrite],
    leaving: frozenset[str],
) -> tuple[StageItem, ...]:
    """Stage items of which those that can be split run in sub-microbatches.

    Args:
        samples: of a microbatch.
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
            parts.append(sub_pipeline_segment(segment, program, samples, rewrites))
        except ShardError as error:
            cut = _cut(segment, program, samples, rewrites)
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
    segment: Segment, whole: SegmentProgram, samples: SampleDims, rewrites: Sequence[Rewrite]
) -> tuple[SubPipelinedSegment, SegmentProgram] | None:
    """Leading part of a segment in sub-microbatches, and its rest; None where that does not pay.

    It pays where the first part has sums to hide and the cut adds none.
    """
    for parts in islice(leading_cuts(segment, samples), _MOST_CUTS):
        try:
            first, rest = (_compile_whole(part, whole, rewrites) for part in parts)
            if 0 < _num_collectives(first) <= _num_collectives(whole) - _num_collectives(rest):
                return sub_pipeline_segment(parts[0], first, samples, rewrites), rest
        except ShardError:
            continue
    return None


def _compile_whole(
    part: Segment, whole: SegmentProgram, rewrites: Sequence[Rewrite]
) -> SegmentProgram:
    returned = zip(part.outputs, returned_nodes(part.graph), strict=True)
    entering = ((n.meta["name"], n) for n in part.graph.find_nodes(op="placeholder"))
    values = {name: node.meta["tensor"] for name, node in (*entering, *returned)}
    local = part
    for rewrite in rewrites:
        local, _ = rewrite(local)
    return replace(compile_segment(local, values, has_draws(part)), saved=whole.saved)


def _num_collectives(program: SegmentProgram) -> int:
    module = collectives.__name__
    return sum(getattr(n.target, "__module__", "") == module for n in program.segment.graph.nodes)


def sub_pipeline_segment(
    segment: Segment, whole: SegmentProgram, samples: SampleDims, rewrites: Sequence[Rewrite]
) -> SubPipelinedSegment:
    """Program of a segment in sub-microbatches.

    Args:
        segment: as traced.
        whole: the same as it runs for a whole microbatch.
        samples: of a microbatch.
        rewrites: what is done in turn to the segments of its stage.

    Raises:
        ShardError: a single sample, or an operator that does not treat them one by one.
    """
    split = split_segment(segment, samples)
    first, second = (_compile(one, rewrites) for one in split.segments)
    return SubPipelinedSegment(whole, (first, second), split.sub_microbatches, split.dims)


def _compile(segment: Segment, rewrites: Sequence[Rewrite]) -> SubMicrobatchProgram:
    for rewrite in rewrites:
        segment, _ = rewrite(segment)
    program = _in_pieces(segment)
    placeholders = segment.graph.find_nodes(op="placeholder")
    conditions = tuple(n.meta["name"] for n in placeholders if is_condition(n))
    if not conditions:
        return program

    @lru_cache(maxsize=64)
    def for_branches(answers: BranchValues) -> SubMicrobatchProgram:
        return _in_pieces(replace(segment, graph=specialize_branches(segment.graph, answers)))

    return replace(program, conditions=conditions, for_branches=for_branches)


def _in_pieces(segment: Segment) -> SubMicrobatchProgram:
    pieces = tuple(
        PieceProgram(piece.segment, _function(piece.segment.graph), piece.all_reduces)
        for piece in cut_at_all_reduces(segment)
    )
    return SubMicrobatchProgram(
        pieces, tuple(zip(segment.outputs, returned_names(segment), strict=True))
    )


def _function(graph: fx.Graph) -> Callable[..., tuple[torch.Tensor, ...]]:
    graph, _ = copy_graph(graph)
    draw_in_logical_order(graph)
    return fx.GraphModule(torch.nn.Module(), graph).forward


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
