"""One stage: runs its segments forward and backward, one microbatch at a time.

Every segment is its own small autograd graph: its inputs are detached leaves, its backward is
called explicitly. So the order of forwards, recomputations and backwards is the schedule's alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from merak.core.random import set_random_state
from merak.engine.deferred import WeightGradients
from merak.engine.program import Program, SegmentProgram, StageProgram
from merak.engine.weights import Leaves, Weights

Values = dict[str, torch.Tensor]


@dataclass(slots=True)
class Microbatch:
    """What a rank knows of one microbatch in one step.

    Args:
        program: what to run for its shape.
        columns: the columns this rank reads.
        derived: this rank's derived values.
        random_key: names the microbatch among all of the job, for its random draws.
        scale: the factor of its loss in the step's loss.
    """

    program: Program
    columns: Values
    derived: Values
    random_key: tuple[int | str, ...]
    scale: float = 1.0


@dataclass(slots=True)
class Saved:
    """A segment's forward, kept for its backward: leaves and outputs of its autograd graph.

    Args:
        inputs: the leaves.
        outputs: None until they are recomputed, where activations are not kept.
        buffers: what the segment writes into, as its forward found it; for the recomputation alone,
            which must neither see the forward's writes nor repeat them.
    """

    inputs: list[torch.Tensor]
    outputs: tuple[torch.Tensor, ...] | None
    buffers: Values


class Stage:
    """Consecutive segments with their parameters.

    Args:
        index: the stage's number in the pipeline.
        weights: what its segments compute with.
        buffers: by name, the buffers and the trace's constants that its segments read.
        waiting: where the segments leave weight gradients, if the schedule splits backwards.
        device: where it computes.
    """

    def __init__(
        self,
        index: int,
        weights: Weights,
        buffers: Mapping[str, torch.Tensor],
        waiting: WeightGradients,
        device: torch.device,
    ) -> None:
        self.index = index
        self.weights = weights
        self.waiting = waiting
        self.buffers = buffers
        self.device = device
        self._saved: dict[int, list[Saved]] = {}

    def forward(self, number: int, microbatch: Microbatch, received: Values, keep: bool) -> Values:
        """Run all segments on one microbatch.

        Args:
            number: the microbatch's number in the step.
            microbatch: its columns and derived values.
            received: the values of the stage's `received`.
            keep: keep every segment's activations for the backward; else those of the segments
                that its program keeps, and of the others only the inputs.

        Returns:
            The values of `sent`, and the model's outputs made here.
        """
        program = microbatch.program.stages[self.index]
        values = dict(received)
        saved = []
        weights = self.weights.of(number)
        for segment in program.segments:
            stays = (keep or segment.kept) and segment.trains
            record = self._start(segment, values, stays or not segment.trains)
            held = (weights, self.buffers)
            outputs = self._call(segment, held, microbatch, record.inputs, stays)
            record.outputs = outputs if stays else None
            saved.append(record if segment.trains else Saved([], (), {}))
            values.update(zip(segment.segment.outputs, outputs, strict=True))
        self._saved[number] = saved
        return _detached(values, program)

    def evaluate(self, microbatch: Microbatch, received: Values) -> Values:
        """Run all segments on one microbatch without a backward to come."""
        program = microbatch.program.stages[self.index]
        values = dict(received)
        for segment in program.segments:
            inputs = [values[name] for name in segment.segment.inputs]
            held = (self.weights.live, self.buffers)
            outputs = self._call(segment, held, microbatch, inputs, keep=False)
            values.update(zip(segment.segment.outputs, outputs, strict=True))
        return _detached(values, program)

    def recompute(self, number: int, microbatch: Microbatch) -> None:
        """Bring back the activations that the forward of a microbatch did not keep."""
        program = microbatch.program.stages[self.index]
        weights = self.weights.of(number)
        for segment, record in zip(program.segments, self._saved[number], strict=True):
            self._materialize(segment, record, weights, microbatch)

    def backward(
        self,
        number: int,
        microbatch: Microbatch,
        gradients: Values,
        segment_done: Callable[[SegmentProgram], None],
    ) -> Values:
        """Run all segments' backwards on one microbatch.

        Where the schedule splits backwards, the gradients of GEMMs' weights are left in `waiting`.

        Args:
            number: the microbatch's number in the step.
            microbatch: as in the forward.
            gradients: of the values of `sent`, and of the loss where it is made here.
            segment_done: called after each segment's backward, last segment first.

        Returns:
            The gradients of the values of `received` that carry one.
        """
        program = microbatch.program.stages[self.index]
        saved = self._saved.pop(number)
        weights = self.weights.of(number)
        self.waiting.start(number)
        for segment in reversed(program.segments):
            record = saved.pop()
            if segment.trains:
                self._materialize(segment, record, weights, microbatch)
                _segment_backward(segment, record, gradients)
            segment_done(segment)
        wanted = microbatch.program.gradients_of(program.received)
        return {name: _gradient(name, gradients, microbatch, self.device) for name in wanted}

    @property
    def num_in_flight(self) -> int:
        """Microbatches forwarded and not yet backwarded."""
        return len(self._saved)

    def forget(self) -> None:
        """Drop what a step that failed has left."""
        self._saved.clear()
        self.waiting.forget()
        self.weights.forget()

    def _start(self, segment: SegmentProgram, values: Values, keep: bool) -> Saved:
        leaves = [
            values[name].detach().requires_grad_(carries)
            for name, carries in zip(segment.segment.inputs, segment.gradient_inputs, strict=True)
        ]
        before = () if keep else segment.written
        return Saved(leaves, None, {name: self.buffers[name].clone() for name in before})

    def _materialize(
        self, segment: SegmentProgram, record: Saved, weights: Leaves, microbatch: Microbatch
    ) -> None:
        if record.outputs is None:
            held = (weights, {**self.buffers, **record.buffers})
            record.outputs = self._call(segment, held, microbatch, record.inputs, keep=True)

    def _call(
        self,
        program: SegmentProgram,
        held: tuple[Leaves, Leaves],
        microbatch: Microbatch,
        inputs: Sequence[torch.Tensor],
        keep: bool,
    ) -> tuple[torch.Tensor, ...]:
        segment = program.segment
        weights, buffers = held
        if program.draws:
            set_random_state(self.device, *microbatch.random_key, segment.index)
        with torch.set_grad_enabled(keep):
            return program.function(
                *(weights[name] for name in segment.parameters),
                *(buffers[name] for name in segment.buffers),
                *(microbatch.columns[name] for name in segment.columns),
                *inputs,
                *(microbatch.derived[name] for name in segment.derived),
            )


def _segment_backward(segment: SegmentProgram, record: Saved, gradients: Values) -> None:
    """One segment's backward; `gradients` loses its outputs' and gains its inputs'."""
    assert record.outputs is not None
    pairs = [
        (output, gradients.pop(name))
        for name, output in zip(segment.segment.outputs, record.outputs, strict=True)
        if name in gradients
    ]
    pairs = [(output, gradient) for output, gradient in pairs if output.requires_grad]
    if not pairs:
        return
    torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
    for name, leaf in zip(segment.segment.inputs, record.inputs, strict=True):
        if leaf.grad is not None:
            # Later readers come first in the backward, as in autograd's own order of summing.
            known = gradients.get(name)
            gradients[name] = leaf.grad if known is None else known + leaf.grad


def _gradient(
    name: str, gradients: Values, microbatch: Microbatch, device: torch.device
) -> torch.Tensor:
    """A gradient to send back; zero where the loss does not depend on the value."""
    if name in gradients:
        return gradients[name]
    meta = microbatch.program.values[name]
    return torch.zeros(meta.shape, dtype=meta.dtype, device=device)


def _detached(values: Values, program: StageProgram) -> Values:
    kept = (*program.sent, *program.results.values())
    return {name: values[name].detach() for name in kept}
