"""One training step of one rank: forwards, backwards, reductions and updates of a schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from merak.engine.stage import Microbatch
from merak.engine.state import EngineState
from merak.engine.step.drain import DrainStep, num_tp_collectives
from merak.engine.step.host_reads import reads_of
from merak.engine.step.schedule_run import ScheduleRun
from merak.engine.tensors_by_name import TensorDict
from merak.engine.weight_versions import StashedWeights
from merak.engine.zero.optimizer_params import norm_of_gradients
from merak.graph.program.program import SegmentProgram
from merak.plan.step_plans import StepPlan
from merak.schedule.ir import GRADIENT_KINDS, Action, Kind
from merak.schedule.steps import OptimizerStep, Payload, ReduceGradients

Update = Callable[[], None]
"""Steps the optimizer for the parameters that have a gradient."""


class TrainingStep(ScheduleRun):
    """Forward and backward of all microbatches, in the order of a plan.

    Args:
        state: of this rank's engine.
        plan: the schedule for these microbatches.
        microbatches: of this replica.
    """

    def __init__(
        self, state: EngineState, plan: StepPlan, microbatches: Sequence[Microbatch]
    ) -> None:
        super().__init__(state, plan, [microbatch.program for microbatch in microbatches])
        self.losses = torch.zeros(len(microbatches), device=state.mesh.device)
        self.reads: list[TensorDict] = [{} for _ in microbatches]  # on the host, by the loss
        # Of the updates inside an asynchronous step: 0, or NaN once a gradient is not finite.
        self.update_norm = torch.zeros((), device=state.mesh.device)
        self._microbatches = microbatches
        self._update: Update | None = None
        self._drain_step: DrainStep | None = None
        # Segments whose gradients have been collected in the action that runs.
        self._collected: set[int] = set()
        # Whether gradients go to host memory beside the backward; those with a scale wait for it.
        self._leaves_early = state.optimizer_params.host is not None and not any(
            isinstance(own.loss_scale, torch.Tensor) or own.loss_scale != 1.0
            for own in microbatches
        )

    def run(self, update: Update | None) -> None:
        """Perform the plan; the gradients of a synchronous one are final afterwards.

        Args:
            update: steps the optimizer inside an asynchronous schedule; the caller steps it after
                a synchronous one.
        """
        self._update = update
        self._state.progress.follow_schedule(self.schedule)
        self._start()
        self.run_plan()
        self._state.reducer.wait()
        self._state.tied.finish()
        self._state.stage_io.finish()

    def run_empty(self) -> None:
        """Join the reductions of a step in which this replica has no microbatch."""
        self._state.tied.start_step(lambda pipe, stage: (), lambda pipe, stage, behind: 0)
        self._state.reducer.start_step(self._reductions())
        for stage in self._reductions():
            self._state.reducer.complete(stage)
        self._state.reducer.wait()
        self._state.tied.finish()

    def _start(self) -> None:
        plan = self._plan
        self._state.reducer.start_step(self._reductions())
        early = self._state.optimizer_params.leave_early if self._leaves_early else None
        self._state.reducer.tell_arrivals(early)
        self._state.tied.start_step(
            lambda pipe, stage: plan.order(stage, pipe, GRADIENT_KINDS), plan.open_sends
        )
        for number, stage in self._state.stages.items():
            if isinstance(stage.weights, StashedWeights):
                stage.weights.start_step(self.schedule.weight_versions[number])
        if self._state.fsdp is not None:
            self._state.fsdp.start(self.unshards())

    def _reductions(self) -> list[int]:
        steps = self._plan.steps[self.rank]
        return [task.stage for task in steps if isinstance(task, ReduceGradients)]

    # ---- handlers of steps ----

    def reduce(self, step: ReduceGradients) -> None:
        """Start the reduction of a stage's gradients."""
        self._state.reducer.complete(step.stage)

    def step_optimizer(self, step: OptimizerStep) -> None:
        """Step the optimizer in an asynchronous schedule; else the caller does, after clipping."""
        if self.schedule.is_synchronous:
            return
        assert self._update is not None
        self._state.reducer.wait()
        stages = [self._state.stages[stage] for stage in step.stages]
        written = {id(leaf) for stage in stages for leaf in stage.weights.live.values()}
        others = [p for p in self._state.parameters.values() if id(p) not in written]
        hidden = [parameter.grad for parameter in others]
        for stage in stages:
            assert isinstance(stage.weights, StashedWeights)
            stage.weights.before_update()
        for parameter in others:
            parameter.grad = None
        self._state.optimizer_params.take_gradients()
        self.update_norm += 0.0 * norm_of_gradients(self._state.optimizer_params)
        self._update()
        self._state.optimizer_params.clear_gradients()
        for parameter, gradient in zip(others, hidden, strict=True):
            parameter.grad = gradient

    # ---- actions ----

    def perform(self, action: Action) -> None:
        """Perform an action and record it; if memory runs out, drain its rest and all after it."""
        oom_guard = self._state.oom_guard
        self._collected.clear()
        if self._state.fsdp is not None:
            self._state.fsdp.order.mark()
        with self._state.progress.action(action):
            if oom_guard.reason is not None:
                self._drain(action, 0)
                return
            num_before = num_tp_collectives(self._state.mesh) if oom_guard.is_armed else 0
            try:
                self.prefetch_following(action)
                self._by_kind[action.kind](self, action)
                return
            except Exception as error:
                if not oom_guard.handles(error):
                    raise
                reason = str(error)
            oom_guard.abort_step(reason)
            self._drain(action, num_tp_collectives(self._state.mesh) - num_before)

    def prefetch(self, action: Action) -> None:
        """Begin to copy back the offloaded activations that a backward reads first."""
        self._state.stages[action.stage].prefetch(action.microbatch)

    def _drain(self, action: Action, num_done: int) -> None:
        with self._state.oom_guard.no_retry():
            drained = self._drain_step or self._start_drain(action)
            drained.perform(action, partial(self._segment_done, action), num_done)

    def _start_drain(self, action: Action) -> DrainStep:
        """Drain the step from an action on, which ran out of memory."""
        state = self._state
        for microbatch in self._microbatches:
            if microbatch.program.has_random_branches:
                state.microbatches.compute_batch_only(microbatch)
        self._drain_step = DrainStep(
            state.mesh,
            state.stages,
            state.stage_io,
            self.schedule,
            self._microbatches,
            state.fsdp,
        )
        own = self.schedule.actions[self.rank]
        self._drain_step.fast_forward(own[: own.index(action)])
        return self._drain_step

    def _segment_done(self, action: Action, segment: SegmentProgram) -> None:
        """Collect and reduce the gradients of a segment, once for each action."""
        if segment.segment.index in self._collected:
            return
        self._collect(segment, action)
        reducer = self._state.reducer
        is_final = self._is_last(action) or reducer.every_microbatch
        if action.kind is Kind.BACKWARD and is_final:
            reducer.ready(action.stage, self._untied(segment))
            if self._leaves_early and not reducer.reduces(action.stage):
                self._state.optimizer_params.leave_early(self._untied(segment))
        self._collected.add(segment.segment.index)

    def forward(self, action: Action) -> None:
        """Run a stage forward, and collect the loss that it makes."""
        stage, number = self._state.stages[action.stage], action.microbatch
        microbatch = self._microbatches[number]
        received = self.received(action, microbatch)
        saves = not self.schedule.recompute[action.stage]
        made = stage.forward(number, microbatch, received, saves)
        self.give(action, made)
        if (loss := _loss_made_by(action.stage, microbatch)) is not None:
            self.losses[number] = made[loss] * microbatch.scale
        if microbatch.program.replay is not None:
            self.reads[number] |= reads_of(microbatch.program, action.stage, made)

    def recompute(self, action: Action) -> None:
        """Recompute the activations of a stage and microbatch."""
        microbatch = self._microbatches[action.microbatch]
        self._state.stages[action.stage].recompute(action.microbatch, microbatch)

    def backward(self, action: Action) -> None:
        """Run a stage backward: all of it, or for an input gradient without what a W is left."""
        stage, number = self._state.stages[action.stage], action.microbatch
        pipe = self.schedule.microbatch_pipes[number]
        made = stage.backward(
            number,
            self._microbatches[number],
            self._gradients(action),
            partial(self._segment_done, action),
            partial(self._state.tied.begin, pipe, number),
            defers=action.kind is Kind.INPUT_GRADIENT,
        )
        if action.stage > 0:
            self._state.stage_io.give(Payload.GRADIENT, action.stage, number, made)

    input_gradient = backward

    def weight_gradient(self, action: Action) -> None:
        """Compute the gradients of weights that the backward has left out."""
        stage, number = self._state.stages[action.stage], action.microbatch
        stage.weight_gradient(number, self._programs[number].stages[action.stage])

    def _gradients(self, action: Action) -> TensorDict:
        """What a backward reads: the next stage's gradients, waited for, and the loss's own."""
        stage, number = action.stage, action.microbatch
        microbatch = self._microbatches[number]
        gradients = self.taken(Payload.GRADIENT, stage + 1, number)
        if (loss := _loss_made_by(stage, microbatch)) is not None:
            dtype = microbatch.program.values[loss].dtype
            scale, of_fp16 = microbatch.scale * self._update_factor(number), microbatch.loss_scale
            if isinstance(of_fp16, torch.Tensor):  # on the device; exact, as numbers of the host
                gradients[loss] = (of_fp16.double() * scale).to(dtype)
            else:
                device = self._state.mesh.device
                gradients[loss] = torch.full((), scale * of_fp16, dtype=dtype, device=device)
        return gradients

    def complete(self, action: Action) -> None:
        """Release the weight version of a stage and microbatch, whose gradients are complete."""
        weights = self._state.stages[action.stage].weights
        if isinstance(weights, StashedWeights):
            weights.release(action.microbatch)
        if not self._is_last(action):
            self._state.reducer.microbatch_done(action.stage)
        super().complete(action)

    def microbatch_done(self, microbatch: int) -> None:
        """Release the batch-only values of a microbatch."""
        self._microbatches[microbatch].batch_only = {}

    # ---- what the actions need ----

    def _collect(self, segment: SegmentProgram, action: Action) -> None:
        pipe = self.schedule.microbatch_pipes[action.microbatch]
        self._state.tied.collect(segment, pipe, action.microbatch)

    def _is_last(self, action: Action) -> bool:
        """Whether an action completes its stage's gradients of the step, here."""
        return self.schedule.is_synchronous and self.completes_update(action)

    def _update_factor(self, number: int) -> float:
        """The step's microbatches for each of an update's: an update takes its own mean."""
        schedule = self.schedule
        per_update, count = schedule.microbatches_per_update, schedule.num_microbatches
        first = schedule.update_of(number) * per_update
        return count / min(per_update, count - first)

    def _untied(self, segment: SegmentProgram) -> list[torch.nn.Parameter]:
        state = self._state
        names = segment.segment.parameters
        return [state.parameters[name] for name in names if name not in state.shared]


def _loss_made_by(stage: int, microbatch: Microbatch) -> str | None:
    """The name of the loss, if a stage computes it."""
    loss = microbatch.program.loss
    made = microbatch.program.stages[stage].results.values()
    return loss if loss in made else None
