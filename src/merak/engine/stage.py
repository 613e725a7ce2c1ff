"""A stage: runs its segments forward and backward, one microbatch at a time.

The backward of every segment is called explicitly, on autograd graphs as small as a segment or
less. So the order of forwards, recomputations and backwards is the schedule's alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from merak.engine.segments import run as run_whole
from merak.engine.segments import run_sub_pipelined
from merak.engine.segments.activation_offload import ActivationOffload
from merak.engine.segments.context import OperatorObserver, SegmentContext, ShardedParameters
from merak.engine.segments.weight_gradients import WeightGradients
from merak.engine.tensors_by_name import (
    GiveLeafGradients,
    ParamLeaves,
    TensorDict,
    no_leaf_gradients,
)
from merak.engine.weight_versions import Weights
from merak.graph.program.program import Program, SegmentProgram, StageProgram, SubPipelinedRun
from merak.plan.memory.unshards import unshards_of
from merak.schedule.ir import Kind


@dataclass(slots=True)
class Microbatch:
    """A microbatch of a step on this rank: its program, columns and batch-only values.

    Args:
        program: what to run for its shape.
        columns: the columns this rank reads.
        batch_only: this rank's batch-only values.
        random_key: names the microbatch among all of the job, for its random state.
        scale: the factor of its loss in the step's loss.
        loss_scale: a further factor of its gradients, which the step's end takes out.
        remote: in evaluation, parameters that other ranks hold; see
            `merak.engine.comm.eval_parameters`.
    """

    program: Program
    columns: TensorDict
    batch_only: TensorDict
    random_key: tuple[int | str, ...]
    scale: float = 1.0
    loss_scale: float | torch.Tensor = 1.0
    remote: TensorDict = field(default_factory=dict)


class Runner(Protocol):
    """A module that runs the segments of a stage: `run` or `run_sub_pipelined`."""

    def forward(self, run: Any, values: TensorDict, ctx: SegmentContext, save: bool) -> Any:
        """Run a segment forward; returns the tensors that its backward needs."""

    def recompute(self, run: Any, saved: Any, ctx: SegmentContext) -> None:
        """Recompute the activations that the forward did not save."""

    def backward(
        self,
        run: Any,
        saved: Any,
        gradients: TensorDict,
        ctx: SegmentContext,
        segment_done: Callable[[SegmentProgram], None],
    ) -> None:
        """Run a segment's backward."""


RUNNERS: Mapping[type, Runner] = {SegmentProgram: run_whole, SubPipelinedRun: run_sub_pipelined}


class Stage:
    """Consecutive segments with their parameters.

    Args:
        index: the stage's number in the pipeline.
        weights: the parameters that its segments compute with.
        buffers: the model's buffers by name.
        weight_gradients: where the segments leave weight gradients, if the schedule splits
            backwards.
        device: where it computes.
        fsdp: parameters that are gathered segment by segment; None for none.
        offload: offloads activations to host memory; None for none.
    """

    def __init__(  # one argument for each thing that the build puts in
        self,
        index: int,
        weights: Weights,
        buffers: Mapping[str, torch.Tensor],
        weight_gradients: WeightGradients,
        device: torch.device,
        fsdp: ShardedParameters | None = None,
        offload: ActivationOffload | None = None,
    ) -> None:
        self.fsdp = fsdp
        self.offload = offload
        self.index = index
        self.weights = weights
        self.weight_gradients = weight_gradients
        self.buffers = buffers
        self.device = device
        self.observer: OperatorObserver | None = None  # of the step that runs
        # Per microbatch in flight, what the backward of each run needs.
        self._saved: dict[int, list[Any]] = {}

    def forward(
        self, number: int, microbatch: Microbatch, received: TensorDict, save: bool
    ) -> TensorDict:
        """Run all segments on one microbatch.

        Args:
            number: the microbatch's number in the step.
            microbatch: its columns and batch-only values.
            received: the values of the stage's `received`.
            save: save every segment's activations for the backward; else those of the segments
                that its program saves, and of the others only the inputs.

        Returns:
            The values of `sent`, and the model's outputs made here.
        """
        program = microbatch.program.stages[self.index]
        ctx = self._context(self.weights.for_microbatch(number), microbatch)
        values = dict(received)
        saved = self._saved[number] = []
        for run in program.runs:
            saved.append(RUNNERS[type(run)].forward(run, values, ctx, save))
            self._segment_ended()
        return _detached(values, program)

    def evaluate(self, microbatch: Microbatch, received: TensorDict) -> TensorDict:
        """Run all segments on one microbatch without a backward to come."""
        program = microbatch.program.stages[self.index]
        remote, live = microbatch.remote, self.weights.live
        ctx = self._context({**live, **remote} if remote else live, microbatch)
        values = dict(received)
        for run in program.runs:
            RUNNERS[type(run)].forward(run, values, ctx, save=False)
        return _detached(values, program)

    def recompute(self, number: int, microbatch: Microbatch) -> None:
        """Recompute the activations that the forward of a microbatch did not save."""
        program = microbatch.program.stages[self.index]
        ctx = self._context(self.weights.for_microbatch(number), microbatch)
        for run, saved in zip(program.runs, self._saved[number], strict=True):
            RUNNERS[type(run)].recompute(run, saved, ctx)

    def backward(
        self,
        number: int,
        microbatch: Microbatch,
        gradients: TensorDict,
        segment_done: Callable[[SegmentProgram], None],
        leaf_gradients: GiveLeafGradients = no_leaf_gradients,
        defers: bool = False,
    ) -> TensorDict:
        """Run all segments' backwards on one microbatch.

        Args:
            number: the microbatch's number in the step.
            microbatch: as in the forward.
            gradients: of the values of `sent`, and of the loss where it is made here.
            segment_done: called after each segment's backward, last segment first.
            leaf_gradients: gives what enters a segment's backward of parameters that several read.
            defers: leave gradients of weights that nobody waits for to `weight_gradient`.

        Returns:
            The gradients of the values of `received` that carry one.
        """
        program = microbatch.program.stages[self.index]
        saved = self._saved.pop(number)
        ctx = self._context(self.weights.for_microbatch(number), microbatch)
        ctx = replace(ctx, leaf_gradients=leaf_gradients)
        self.weight_gradients.start(number, defers)
        self._prefetch(saved)
        for run in reversed(program.runs):
            self._prefetch(saved[:-1])
            RUNNERS[type(run)].backward(run, saved.pop(), gradients, ctx, segment_done)
            self._segment_ended()
        wanted = microbatch.program.gradients_of(program.received)
        return {name: _gradient(name, gradients, microbatch, self.device) for name in wanted}

    def weight_gradient(self, number: int, program: StageProgram) -> None:
        """Compute the gradients of weights that the backward of a microbatch has left for later.

        Args:
            number: the microbatch's number in the step.
            program: of the stage, for the microbatch.
        """
        for own in unshards_of(Kind.WEIGHT_GRADIENT, program, recomputes=False):
            self.weight_gradients.run(number, own.segment.segment.index)
            if self.fsdp is not None:
                self.fsdp.reduce(own.segment.segment.parameters)

    def prefetch(self, number: int) -> None:
        """Prefetch the activations that the next microbatch's backward reads first."""
        self._prefetch(self._saved.get(number, []))

    def _prefetch(self, saved: Sequence[Any]) -> None:
        if self.offload is not None and saved and saved[-1].offloaded is not None:
            self.offload.prefetch(saved[-1].offloaded)

    def _segment_ended(self) -> None:
        if self.offload is not None:
            self.offload.segment_ended()

    def forget(self) -> None:
        """Free the state of a step that failed."""
        self._saved.clear()
        if self.offload is not None:
            self.offload.forget()
        self.weight_gradients.forget()
        self.weights.forget()

    def _context(self, weights: ParamLeaves, microbatch: Microbatch) -> SegmentContext:
        return SegmentContext(
            weights=weights,
            buffers={**self.buffers, **microbatch.program.constants},
            columns=microbatch.columns,
            batch_only=microbatch.batch_only,
            random_key=microbatch.random_key,
            device=self.device,
            fsdp=self.fsdp,
            offload=self.offload,
            observer=self.observer,
            weight_gradients=self.weight_gradients,
        )


def _gradient(
    name: str, gradients: TensorDict, microbatch: Microbatch, device: torch.device
) -> torch.Tensor:
    """A gradient to send back; zero where the loss does not depend on the value."""
    if name in gradients:
        return gradients[name]
    meta = microbatch.program.values[name]
    return torch.zeros(meta.shape, dtype=meta.dtype, device=device)


def _detached(values: TensorDict, program: StageProgram) -> TensorDict:
    names = (*program.sent, *program.results.values())
    return {name: values[name].detach() for name in names}
