"""Sub-pipelined tensor parallelism: two sub-microbatches of a microbatch, one beside the other.

Each sub-microbatch goes through the pieces of its segments and yields to the other one whenever it
has started an all-reduce, for which it waits when it continues. So one's all-reduce runs while the
other computes, across segments, in forward, recomputation and backward.

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
"""The run of a sub-microbatch, which yields where it has started an all-reduce."""


@dataclass(slots=True)
class SavedPiece:
    """The tensors that a piece saves for its backward: leaves and outputs of its graph."""

    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]


@dataclass(slots=True)
class SavedSegment:
    """The saved inputs of a segment for one sub-microbatch, and its pieces unless recomputed."""

    inputs: TensorDict
    pieces: list[SavedPiece] | None = None


@dataclass(slots=True)
class SavedRun:
    """The saved tensors of consecutive segments, for both sub-microbatches."""

    sub_microbatches: tuple[list[SavedSegment], list[SavedSegment]] = field(
        default_factory=lambda: ([], [])
    )


def forward(run: SubPipelinedRun, values: TensorDict, ctx: SegmentContext, save: bool) -> SavedRun:
    """Run segments as two sub-microbatches.

    Args:
        run: the segments.
        values: of the whole microbatch; gains what the run gives to others.
        ctx: what else the segments read.
        save: save the activations for the backward; else only those of segments whose program
            says so, and the others' inputs.

    Returns:
        The tensors that the backward needs.
    """
    saved = SavedRun()
    made: tuple[TensorDict, TensorDict] = ({}, {})

    def work(half: int) -> Coroutine:
        local = made[half]
        for segment in run.segments:
            for name in segment.whole.segment.inputs:
                if name not in local:
                    local[name] = _samples_of(
                        values[name], segment.dims.get(name), run.sub_microbatches[half]
                    )
            record = _save_inputs(segment, local)
            saves = (save or segment.whole.saved) and segment.whole.trains
            job = _SubMicrobatchRun(segment, half, ctx, saves)
            local.update((yield from job.forward(record)))
            saved.sub_microbatches[half].append(
                record if segment.whole.trains else SavedSegment({})
            )

    _alternate(work(0), work(1))
    for name, dim in run.outputs.items():
        parts = [half[name].detach() for half in made]
        values[name] = parts[0] if dim is None else torch.cat(parts, dim)
    return saved


def recompute(run: SubPipelinedRun, saved: SavedRun, ctx: SegmentContext) -> None:
    """Recompute the activations that the forward did not save."""

    def work(half: int) -> Coroutine:
        for segment, record in zip(run.segments, saved.sub_microbatches[half], strict=True):
            if record.pieces is None and segment.whole.trains:
                yield from _SubMicrobatchRun(segment, half, ctx, True).forward(record)

    _alternate(work(0), work(1))


def backward(
    run: SubPipelinedRun,
    saved: SavedRun,
    gradients: TensorDict,
    ctx: SegmentContext,
    segment_done: Callable[[SegmentProgram], None],
) -> None:
    """Run the backward of segments as two sub-microbatches.

    Args:
        run: the segments.
        saved: from the forward; released on the way.
        gradients: of the whole microbatch; loses those of the run's outputs and gains those of
            what it reads from others.
        ctx: as in the forward.
        segment_done: called when both sub-microbatches of a segment are done, last segment first.
    """
    local: tuple[TensorDict, TensorDict] = ({}, {})
    for name, dim in run.outputs.items():
        if (gradient := gradients.pop(name, None)) is not None:
            for half in range(1 if dim is None else 2):
                local[half][name] = _samples_of(gradient, dim, run.sub_microbatches[half])
    done: set[int] = set()

    def work(half: int) -> Coroutine:
        for segment in reversed(run.segments):
            record = saved.sub_microbatches[half].pop()
            if segment.whole.trains:
                job = _SubMicrobatchRun(segment, half, ctx, True)
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
            add_to(gradients, name, _join(parts, split_dim))


def _alternate(*sub_microbatches: Coroutine) -> None:
    """Run both sub-microbatches in turn until they are done."""
    working = list(sub_microbatches)
    while working:
        working = [half for half in working if next(half, _DONE) is not _DONE]


_DONE: Any = object()


def _samples_of(tensor: torch.Tensor, dim: int | None, samples: SubMicrobatch) -> torch.Tensor:
    """The samples of a sub-microbatch in a value; the whole value if it has no sample dim."""
    return tensor if dim is None else tensor.narrow(dim, *samples.rows(tensor.shape[dim]))


def _join(parts: list[torch.Tensor], dim: int | None) -> torch.Tensor:
    """The gradient of a value of both sub-microbatches: concatenated, or their sum."""
    if dim is not None:
        return torch.cat(parts, dim)
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _save_inputs(segment: SubPipelinedSegment, local: TensorDict) -> SavedSegment:
    whole = segment.whole
    carrying = zip(whole.segment.inputs, whole.gradient_inputs, strict=True)
    return SavedSegment({name: local[name].detach().requires_grad_(c) for name, c in carrying})


class _SubMicrobatchRun:
    """The run of one sub-microbatch through one segment.

    Args:
        segment: the segment.
        half: 0 or 1, the sub-microbatch.
        ctx: what it reads besides its inputs.
        save: whether the forward is for a backward.
    """

    def __init__(
        self, segment: SubPipelinedSegment, half: int, ctx: SegmentContext, save: bool
    ) -> None:
        self._program = segment.programs[half].given(ctx.batch_only)
        self._whole = segment.whole
        self._dims = segment.dims
        self._samples = segment.sub_microbatches[half]
        self._context = ctx
        self._keep = save

    def forward(self, record: SavedSegment) -> Generator[None, None, TensorDict]:
        """Run the pieces, and save them in the record if they are for a backward.

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
            yield from self._reduce_outputs(piece.all_reduces, values)
        if self._keep:
            record.pieces = pieces
        return {name: values[found] for name, found in self._program.returned}

    def backward(self, record: SavedSegment, gradients: TensorDict) -> Coroutine:
        """Run the pieces' backwards; `gradients` loses the outputs' and gains the inputs'."""
        assert record.pieces is not None
        for name, found in self._program.returned:
            if found != name and name in gradients:
                add_to(gradients, found, gradients.pop(name))
        for piece in reversed(self._program.pieces):
            yield from self._reduce_gradients(piece.all_reduces, gradients)
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
            return ctx.function(piece)(
                *(ctx.weights[name] for name in segment.parameters),
                *(ctx.buffers[name] for name in segment.buffers),
                *columns,
                *inputs,
                *batch_only,
            )

    def _own(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        return _samples_of(tensor, self._dims.get(name), self._samples)

    def _reduce_outputs(self, crossings: Sequence[PieceAllReduce], values: TensorDict) -> Coroutine:
        """All-reduce the outputs of a piece, while the other sub-microbatch runs."""
        works = []
        for crossing in crossings:
            source = values[crossing.source]
            if not crossing.in_forward:
                values[crossing.result] = source
                continue
            total = source.detach().clone(memory_format=torch.contiguous_format)
            values[crossing.result] = total.requires_grad_(source.requires_grad)
            works.append(start_all_reduce(total.detach(), TENSOR_AXIS))
        if works:
            yield from self._yield_turn(works)

    def _reduce_gradients(
        self, crossings: Sequence[PieceAllReduce], gradients: TensorDict
    ) -> Coroutine:
        """All-reduce the gradients of a piece, while the other sub-microbatch runs."""
        works = []
        arriving = []
        for crossing in crossings:
            gradient = gradients.pop(crossing.result, None)
            if gradient is None:
                continue
            if not crossing.in_forward:
                gradient = gradient.clone(memory_format=torch.contiguous_format)
                works.append(start_all_reduce(gradient, TENSOR_AXIS))
            arriving.append((crossing.source, gradient))
        if works:
            yield from self._yield_turn(works)
        for source, gradient in arriving:
            add_to(gradients, source, gradient)

    def _yield_turn(self, works: Sequence[dist.Work | None]) -> Coroutine:
        draws, device = self._whole.draws, self._context.device
        state = random_state(device) if draws else None
        yield
        if state is not None:
            restore_random_state(device, state)
        for work in works:
            if work is not None:
                work.wait()
