"""Sub-pipelined tensor parallelism: two halves of a microbatch, one beside the other.

Each half goes through the pieces of its segments and hands over to the other half whenever it has
started an all-reduce; it waits for the sum only when its turn comes again. So one half's all-reduce
runs while the other half computes, across segments, in forward, recomputation and backward.

Source: Merak (IEEE TPDS), section 5.3.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from merak.core.random import random_state, restore_random_state, set_random_state
from merak.engine.segments.context import SegmentContext, add_to
from merak.engine.segments.run import propagate
from merak.engine.tensors_by_name import TensorDict
from merak.graph.program.program import (
    PieceProgram,
    SegmentProgram,
    SubPipelinedRun,
    SubPipelinedSegment,
)
from merak.graph.sub_pipelining.pieces import PieceAllReduce
from merak.graph.sub_pipelining.sub_microbatch import SubMicrobatch
from merak.ops.collectives import start_all_reduce

TENSOR_AXIS = "tp"

Coroutine = Generator[None, None, None]
"""A half at work: it ends a turn where it has started an all-reduce."""


@dataclass(slots=True)
class SavedPiece:
    """A piece's forward, kept for its backward: leaves and outputs of its autograd graph."""

    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]


@dataclass(slots=True)
class SavedHalf:
    """One half of one segment: what entered it, and its pieces unless they are recomputed."""

    inputs: TensorDict
    pieces: list[SavedPiece] | None = None


@dataclass(slots=True)
class SavedRun:
    """Both halves of consecutive segments."""

    halves: tuple[list[SavedHalf], list[SavedHalf]] = field(default_factory=lambda: ([], []))


def forward(run: SubPipelinedRun, values: TensorDict, ctx: SegmentContext, save: bool) -> SavedRun:
    """Run segments in halves.

    Args:
        run: the segments.
        values: of the whole microbatch; gains what the run gives to others.
        ctx: what else the segments read.
        save: keep the activations for the backward; else only those of segments whose program
            says so, and the others' inputs.

    Returns:
        What the backward needs.
    """
    saved = SavedRun()
    made: tuple[TensorDict, TensorDict] = ({}, {})

    def work(half: int) -> Coroutine:
        local = made[half]
        for segment in run.segments:
            for name in segment.whole.segment.inputs:
                if name not in local:
                    local[name] = _part(
                        values[name], segment.dims.get(name), run.sub_microbatches[half]
                    )
            record = _enter(segment, local)
            stays = (save or segment.whole.saved) and segment.whole.trains
            job = _Half(segment, half, ctx, stays)
            local.update((yield from job.forward(record)))
            saved.halves[half].append(record if segment.whole.trains else SavedHalf({}))

    _alternate(work(0), work(1))
    for name, dim in run.outputs.items():
        parts = [half[name].detach() for half in made]
        values[name] = parts[0] if dim is None else torch.cat(parts, dim)
    return saved


def recompute(run: SubPipelinedRun, saved: SavedRun, ctx: SegmentContext) -> None:
    """Bring back the activations that the forward did not keep."""

    def work(half: int) -> Coroutine:
        for segment, record in zip(run.segments, saved.halves[half], strict=True):
            if record.pieces is None and segment.whole.trains:
                yield from _Half(segment, half, ctx, True).forward(record)

    _alternate(work(0), work(1))


def backward(
    run: SubPipelinedRun,
    saved: SavedRun,
    gradients: TensorDict,
    ctx: SegmentContext,
    segment_done: Callable[[SegmentProgram], None],
) -> None:
    """Run the backward of segments in halves.

    Args:
        run: the segments.
        saved: from the forward; released on the way.
        gradients: of the whole microbatch; loses those of the run's outputs and gains those of
            what it reads from others.
        ctx: as in the forward.
        segment_done: called when both halves of a segment are done, last segment first.
    """
    local: tuple[TensorDict, TensorDict] = ({}, {})
    for name, dim in run.outputs.items():
        if (gradient := gradients.pop(name, None)) is not None:
            for half in range(1 if dim is None else 2):
                local[half][name] = _part(gradient, dim, run.sub_microbatches[half])
    done: set[int] = set()

    def work(half: int) -> Coroutine:
        for segment in reversed(run.segments):
            record = saved.halves[half].pop()
            if segment.whole.trains:
                job = _Half(segment, half, ctx, True)
                if record.pieces is None:
                    yield from job.forward(record)
                yield from job.backward(record, local[half])
            if id(segment) in done:
                segment_done(segment.whole)
            done.add(id(segment))

    _alternate(work(0), work(1))
    for name, split_dim in run.inputs.items():
        parts = [half.pop(name) for half in local if name in half]
        if parts:
            add_to(gradients, name, _joined(parts, split_dim))


def _alternate(*halves: Coroutine) -> None:
    """Let the halves take turns until both are done."""
    working = list(halves)
    while working:
        working = [half for half in working if next(half, _DONE) is not _DONE]


_DONE: Any = object()


def _part(tensor: torch.Tensor, dim: int | None, share: SubMicrobatch) -> torch.Tensor:
    """A half's samples of a value of the whole microbatch; all of a value that has none."""
    return tensor if dim is None else tensor.narrow(dim, *share.rows(tensor.shape[dim]))


def _joined(parts: list[torch.Tensor], dim: int | None) -> torch.Tensor:
    """The gradient of what both halves have read: side by side, or the sum of the same value's."""
    if dim is not None:
        return torch.cat(parts, dim)
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _enter(segment: SubPipelinedSegment, local: TensorDict) -> SavedHalf:
    whole = segment.whole
    carrying = zip(whole.segment.inputs, whole.gradient_inputs, strict=True)
    return SavedHalf({name: local[name].detach().requires_grad_(c) for name, c in carrying})


class _Half:
    """One half of one segment at work.

    Args:
        segment: the segment.
        half: 0 or 1.
        ctx: what it reads besides its inputs.
        save: whether the forward is for a backward.
    """

    def __init__(
        self, segment: SubPipelinedSegment, half: int, ctx: SegmentContext, save: bool
    ) -> None:
        self._program = segment.programs[half].given(ctx.batch_only)
        self._whole = segment.whole
        self._dims = segment.dims
        self._share = segment.sub_microbatches[half]
        self._context = ctx
        self._keep = save

    def forward(self, record: SavedHalf) -> Generator[None, None, TensorDict]:
        """Run the pieces, and keep them in the record if they are for a backward.

        Returns:
            The segment's outputs by name.
        """
        values = dict(record.inputs)
        pieces = []
        if self._whole.draws:
            key = self._context.random_key
            set_random_state(self._context.device, *key, self._whole.segment.index)
        for piece in self._program.pieces:
            # A piece has an autograd graph of its own, from leaves.
            inputs = [
                values[n].detach().requires_grad_(values[n].requires_grad)
                for n in piece.segment.inputs
            ]
            outputs = self._call(piece, inputs)
            pieces.append(SavedPiece(inputs, outputs))
            values.update(zip(piece.segment.outputs, outputs, strict=True))
            yield from self._cross(piece.all_reduces, values)
        if self._keep:
            record.pieces = pieces
        return {name: values[found] for name, found in self._program.returned}

    def backward(self, record: SavedHalf, gradients: TensorDict) -> Coroutine:
        """Run the pieces' backwards; `gradients` loses the outputs' and gains the inputs'."""
        assert record.pieces is not None
        for name, found in self._program.returned:
            if found != name and name in gradients:
                add_to(gradients, found, gradients.pop(name))
        for piece in reversed(self._program.pieces):
            yield from self._cross_back(piece.all_reduces, gradients)
            saved, segment = record.pieces.pop(), piece.segment
            propagate(segment.outputs, saved.outputs, segment.inputs, saved.inputs, gradients)

    def _call(
        self, piece: PieceProgram, inputs: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        segment, ctx = piece.segment, self._context
        if not segment.outputs:
            return ()
        columns = (self._own(ctx.columns[n], n) for n in segment.columns)
        batch_only = (self._own(ctx.batch_only[n], n) for n in segment.batch_only)
        with torch.set_grad_enabled(self._keep):
            return piece.function(
                *(ctx.weights[name] for name in segment.parameters),
                *(ctx.buffers[name] for name in segment.buffers),
                *columns,
                *inputs,
                *batch_only,
            )

    def _own(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        return _part(tensor, self._dims.get(name), self._share)

    def _cross(self, crossings: Sequence[PieceAllReduce], values: TensorDict) -> Coroutine:
        """Sum what the ranks have made of a value, while the other half takes its turn."""
        sums = []
        for crossing in crossings:
            source = values[crossing.source]
            if not crossing.in_forward:
                values[crossing.result] = source
                continue
            total = source.detach().clone(memory_format=torch.contiguous_format)
            values[crossing.result] = total.requires_grad_(source.requires_grad)
            sums.append(start_all_reduce(total.detach(), TENSOR_AXIS))
        if sums:
            yield from self._let_other(sums)

    def _cross_back(self, crossings: Sequence[PieceAllReduce], gradients: TensorDict) -> Coroutine:
        """Sum the gradients that the ranks have made, while the other half takes its turn."""
        sums = []
        arriving = []
        for crossing in crossings:
            gradient = gradients.pop(crossing.result, None)
            if gradient is None:
                continue
            if not crossing.in_forward:
                gradient = gradient.clone(memory_format=torch.contiguous_format)
                sums.append(start_all_reduce(gradient, TENSOR_AXIS))
            arriving.append((crossing.source, gradient))
        if sums:
            yield from self._let_other(sums)
        for source, gradient in arriving:
            add_to(gradients, source, gradient)

    def _let_other(self, sums: Sequence[dist.Work | None]) -> Coroutine:
        draws, device = self._whole.draws, self._context.device
        state = random_state(device) if draws else None
        yield
        if state is not None:
            restore_random_state(device, state)
        for work in sums:
            if work is not None:
                work.wait()
