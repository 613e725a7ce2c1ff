"""Sub-pipelined tensor parallelism: two sub-microbatches of a microbatch, in turns.

Each goes through the parts of its segments up to the next all-reduce that it starts, and then it is
the other one's turn. So one's all-reduce runs while the other computes, across segments, in
forward, recomputation and backward.

Source: Merak (IEEE TPDS), section 5.3.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from merak.core.random import random_state, restore_random_state
from merak.engine.segments import joint_call
from merak.engine.segments import run as run_whole
from merak.engine.segments.context import SegmentContext, add_to
from merak.engine.segments.joint_call import Call, JointForward
from merak.engine.tensors_by_name import TensorDict, no_leaf_gradients
from merak.graph.joint.generate import run as run_part
from merak.graph.program.program import SegmentProgram, SubPipelinedRun, SubPipelinedSegment
from merak.graph.sub_pipelining.sub_microbatch import SubMicrobatch

Task = Callable[[], Call | None]
"""Begins a call; None where everything is done with that."""


@dataclass(slots=True)
class SavedRun:
    """What the forward of consecutive segments leaves for their backwards, by sub-microbatch."""

    sub_microbatches: tuple[list[run_whole.Saved], list[run_whole.Saved]] = field(
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
    both = _both(run, ctx, saved)
    for one in both:
        for name, dim in run.inputs.items():
            one.values[name] = _samples_of(values[name], dim, one.samples)
    _in_turns(*([partial(one.forward, segment, save) for segment in run.segments] for one in both))
    for name, dim in run.outputs.items():
        parts = [one.values[name].detach() for one in both]
        values[name] = parts[0] if dim is None else torch.cat(parts, dim)
    return saved


def recompute(run: SubPipelinedRun, saved: SavedRun, ctx: SegmentContext) -> None:
    """Recompute the activations that the forward did not save."""
    numbered = [(segment, number) for number, segment in enumerate(run.segments)]
    both = _both(run, ctx, saved)
    _in_turns(*([partial(one.recompute, *own) for own in numbered] for one in both))


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
    both = _both(run, ctx, saved)
    for name, dim in run.outputs.items():
        for one in both[: 1 if dim is None else 2] if name in gradients else ():
            one.values[name] = _samples_of(gradients[name], dim, one.samples)
        gradients.pop(name, None)
    done: set[int] = set()

    def half_done(segment: SubPipelinedSegment) -> None:
        if id(segment) in done:
            if ctx.weight_gradients is not None:
                ctx.weight_gradients.segment_ended()
            segment_done(segment.whole)
        done.add(id(segment))

    def tasks(one: _SubMicrobatchRun) -> list[Task]:
        found: list[Task] = []
        for segment in reversed(run.segments):
            found += [partial(one.recompute, segment), partial(one.backward, segment, half_done)]
        return found

    _in_turns(*map(tasks, both))
    for name, split_dim in run.inputs.items():
        parts = [one.values.pop(name) for one in both if name in one.values]
        if parts:
            add_to(gradients, name, _join(parts, split_dim))


def _in_turns(*tasks: Iterable[Task]) -> None:
    """Run the tasks of sub-microbatches, each up to the next all-reduce that it starts."""
    working = [_Turns(deque(own)) for own in tasks]
    while working:
        working = [one for one in working if one.run()]


@dataclass(slots=True)
class _Turns:
    """The tasks of a sub-microbatch, and the call that has begun.

    Args:
        tasks: to come.
        call: whose part has run up to an all-reduce, if one has.
        state: of the generator, where that has left it; None where it does not draw.
    """

    tasks: deque[Task]
    call: Call | None = None
    state: torch.Tensor | None = None

    def run(self) -> bool:
        """Run until an all-reduce has been started; whether anything is left."""
        while self.call is not None or self.tasks:
            call = self.tasks.popleft()() if self.call is None else self.call
            if call is None:
                continue
            results = self._run_piece(call)
            self.call = call if call.part else None
            if self.call is not None:
                return True
            call.end(results)
            del call, results  # which the next one may drop
        return False

    def _run_piece(self, call: Call) -> tuple[torch.Tensor, ...]:
        """Run the next piece of a call, which draws on from where the last one has drawn."""
        if self.state is not None:
            assert call.draws_on is not None
            restore_random_state(call.draws_on, self.state)
        piece, call.part = call.part[:1], call.part[1:]
        results = run_part(piece, call.given)
        self.state = None
        if call.draws_on is not None and call.part:
            self.state = random_state(call.draws_on)
        return results


@dataclass(slots=True)
class _SubMicrobatchRun:
    """The run of a sub-microbatch through some segments, task by task.

    Args:
        number: 0 or 1, the sub-microbatch.
        samples: of it.
        ctx: what its segments read besides their inputs.
        saved: by segment, what its forward has left so far.
        values: that its segments read and make; of a backward, gradients.
    """

    number: int
    samples: SubMicrobatch
    ctx: SegmentContext
    saved: list[run_whole.Saved]
    values: TensorDict = field(default_factory=dict)

    def forward(self, segment: SubPipelinedSegment, save: bool) -> Call | None:
        """Begin the forward of a segment; autograd runs it where its backward is no graph."""
        run = segment.programs[self.number]
        saves = (save or run.saved) and run.trains
        begun = joint_call.begin_forward(run, self.values, self.ctx, saves)
        if begun is None:
            self.saved.append(run_whole.forward(run, self.values, self.ctx, save))
            return None
        made, call = begun
        self.saved.append(made if run.trains else run_whole.SavedForward([], (), {}))
        return call

    def recompute(self, segment: SubPipelinedSegment, number: int = -1) -> Call | None:
        """Begin the recomputation of a segment.

        Args:
            segment: the segment.
            number: of what it has saved.
        """
        run, saved = segment.programs[self.number], self.saved[number]
        if not isinstance(saved, JointForward):
            run_whole.recompute(run, saved, self.ctx)
            return None
        return joint_call.begin_recompute(run, saved, self.ctx) if saved.saved is None else None

    def backward(
        self, segment: SubPipelinedSegment, done: Callable[[SubPipelinedSegment], None]
    ) -> Call | None:
        """Begin the backward of a segment.

        Args:
            segment: the segment.
            done: called behind it.
        """
        run, saved = segment.programs[self.number], self.saved.pop()
        if not isinstance(saved, JointForward):
            run_whole.backward(run, saved, self.values, self.ctx, lambda _: done(segment))
            return None
        call = joint_call.begin_backward(run, saved, self.values, self.ctx)
        if call is None:
            done(segment)
            return None
        own_end = call.end

        def end(made: tuple[torch.Tensor, ...]) -> None:
            own_end(made)
            done(segment)

        call.end = end
        return call


def _both(
    run: SubPipelinedRun, ctx: SegmentContext, saved: SavedRun
) -> tuple[_SubMicrobatchRun, _SubMicrobatchRun]:
    """Both sub-microbatches of a run."""
    first, second = (
        _SubMicrobatchRun(number, own, _context(run, own, ctx), saved.sub_microbatches[number])
        for number, own in enumerate(run.sub_microbatches)
    )
    return first, second


def _context(run: SubPipelinedRun, samples: SubMicrobatch, ctx: SegmentContext) -> SegmentContext:
    """What a sub-microbatch reads besides its inputs; gradients of parameters are summed behind."""
    dims = {name: dim for segment in run.segments for name, dim in segment.dims.items()}

    def own(whole: Mapping[str, torch.Tensor]) -> TensorDict:
        return {name: _samples_of(t, dims.get(name), samples) for name, t in whole.items()}

    return replace(
        ctx,
        columns=own(ctx.columns),
        batch_only=own(ctx.batch_only),
        leaf_gradients=no_leaf_gradients,
    )


def _samples_of(tensor: torch.Tensor, dim: int | None, samples: SubMicrobatch) -> torch.Tensor:
    """The samples of a sub-microbatch in a value; the whole value if it has no sample dim."""
    return tensor if dim is None else tensor.narrow(dim, *samples.rows(tensor.shape[dim]))


def _join(parts: list[torch.Tensor], dim: int | None) -> torch.Tensor:
    """The gradient of a value of both sub-microbatches: concatenated, or their sum."""
    if dim is not None:
        return torch.cat(parts, dim)
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]
