"""The engine of one rank: executes its steps of a schedule, whatever the schedule is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from merak.core.random import own_random_state
from merak.core.shards import ParameterShard
from merak.engine.gradients import clip_gradients, global_norm
from merak.engine.parts import Parts, Plan, Signature
from merak.engine.program import Program, SegmentProgram
from merak.engine.stage import Microbatch, Values
from merak.schedule.ir import FINAL_KINDS, GRADIENT_KINDS, Action, Kind
from merak.schedule.steps import (
    Compute,
    OptimizerStep,
    Payload,
    Receive,
    ReduceGradients,
    Send,
)


@dataclass(slots=True)
class _StepState:
    """One training step while it runs."""

    plan: Plan
    microbatches: list[Microbatch]
    losses: torch.Tensor
    last_backward: dict[int, int]
    # Per microbatch, this rank's stages that have not yet completed its gradients.
    stages_left: list[int]


class Engine:
    """Trains and evaluates this rank's stages together with the other ranks.

    Args:
        parts: see `engine.build.build_engine`.
    """

    def __init__(self, parts: Parts) -> None:
        self.mesh = parts.mesh
        self.parameters = parts.parameters
        self._parts = parts
        self._num_stages = len(parts.stage_rank)
        self._fixed: dict[int, Values] = {}
        # What a neighbouring stage on this rank, or a transfer to come, takes: by payload,
        # producing stage and microbatch.
        self._made: dict[tuple[Payload, int, int], Values] = {}
        self._state: _StepState | None = None

    @property
    def holds_first_stage(self) -> bool:
        """Whether this rank runs the first stage."""
        return self._parts.stage_rank[0] == self.mesh.pp_rank

    @property
    def holds_last_stage(self) -> bool:
        """Whether this rank runs the last stage, where the loss is made."""
        return self._parts.stage_rank[-1] == self.mesh.pp_rank

    def is_owner(self, name: str) -> bool:
        """Whether this rank's copy of a parameter counts (in norms, in checkpoints)."""
        return self._parts.tied.is_owner(name)

    @property
    def shards(self) -> Mapping[str, ParameterShard]:
        """How parameters that are split over tp lie on the ranks."""
        return self._parts.base.shards

    def held(self) -> frozenset[str]:
        """Names of the parameters, and of the buffers its segments read, that this rank holds."""
        return frozenset(self.parameters) | self._parts.buffers

    def columns(self, signature: Signature, training: bool = True) -> tuple[str, ...]:
        """The columns this rank reads of a batch."""
        return self._parts.program_for(signature, training).columns

    def outputs(self, signature: Signature) -> tuple[str, ...]:
        """Names of the model's outputs in evaluation, in its order, wherever they are made."""
        return self._parts.program_for(signature, False).outputs

    def train_step(
        self,
        step: int,
        signatures: Sequence[Signature],
        batches: Sequence[Mapping[str, torch.Tensor]],
        scale: float = 1.0,
    ) -> torch.Tensor:
        """Forward and backward of all microbatches; gradients are final when it returns.

        Args:
            step: the job's step number; keys the random draws.
            signatures: of each microbatch of this data parallel replica, the same on all ranks of
                its pipeline.
            batches: per microbatch, at least the columns this rank reads.
            scale: the factor of each microbatch's loss in the step's loss.

        Returns:
            The microbatches' losses times `scale`, (number of microbatches,), float32, on every
            rank of the pipeline.
        """
        try:
            with own_random_state(self.mesh.device):
                self._run_steps(step, signatures, batches, scale)
            return self._finish_step()
        except BaseException:
            self.forget()
            raise

    def _finish_step(self) -> torch.Tensor:
        state = self._state
        assert state is not None
        parts = self._parts
        parts.reducer.wait()
        parts.tied.finish()
        parts.transfers.finish()
        self._state = None
        group = self.mesh.group("pp")
        if group is not None:
            dist.all_reduce(state.losses, group=group)
        return state.losses

    def forget(self) -> None:
        """Drop what a step or evaluation that failed has left, so that the next one starts clean.

        Peers must have failed alike: transfers that only one side has begun stay unmatched.
        """
        parts = self._parts
        self._state = None
        self._made.clear()
        for stage in parts.stages.values():
            stage.forget()
        for exchange in (parts.transfers, parts.reducer, parts.tied):
            exchange.forget()

    def _run_steps(
        self,
        step: int,
        signatures: Sequence[Signature],
        batches: Sequence[Mapping[str, torch.Tensor]],
        scale: float,
    ) -> None:
        parts = self._parts
        count = len(signatures)
        losses = torch.zeros(count, device=self.mesh.device)
        if count == 0:
            # A replica without a microbatch still takes part in every reduction.
            parts.tied.start_step(lambda stage: ())
            self._reduce_nothing()
            self._state = _StepState(parts.plan_for(1), [], losses, {}, [])
            return
        plan = parts.plan_for(count)
        microbatches = [
            self._microbatch(parts.program_for(s, True), batch, (step, m), scale)
            for m, (s, batch) in enumerate(zip(signatures, batches, strict=True))
        ]
        last = {stage: plan.order(stage, FINAL_KINDS)[-1] for stage in parts.stages}
        self._state = _StepState(plan, microbatches, losses, last, [len(parts.stages)] * count)
        parts.tied.start_step(lambda stage: plan.order(stage, GRADIENT_KINDS))
        for task in plan.steps[self.mesh.pp_rank]:
            _HANDLERS[type(task)](self, task)

    def evaluate(
        self,
        signatures: Sequence[Signature],
        batches: Sequence[Mapping[str, torch.Tensor]],
    ) -> list[Values]:
        """Forward of some microbatches, without randomness or gradients.

        Args:
            signatures: as in `train_step`.
            batches: as in `train_step`.

        Returns:
            Per microbatch the model's outputs by name that this rank's stages make.
        """
        try:
            with own_random_state(self.mesh.device):
                results = [
                    self._evaluate_microbatch(number, signature, batch)
                    for number, (signature, batch) in enumerate(
                        zip(signatures, batches, strict=True)
                    )
                ]
            self._parts.transfers.finish()
        except BaseException:
            self.forget()
            raise
        return results

    def _evaluate_microbatch(
        self, number: int, signature: Signature, batch: Mapping[str, torch.Tensor]
    ) -> Values:
        program = self._parts.program_for(signature, False)
        microbatch = self._microbatch(program, batch, (0, number), 1.0)
        microbatch.derived = self._derive(microbatch)
        outputs: Values = {}
        for stage in sorted(self._parts.stages):
            outputs |= self._evaluate_stage(stage, number, microbatch)
        return outputs

    def gradient_norm(self) -> torch.Tensor:
        """The global 2-norm of the gradients, a scalar, the same on every rank."""
        counted = {n: p for n, p in self.parameters.items() if self.is_owner(n)}
        return global_norm(
            list(counted.values()),
            frozenset(id(p) for n, p in counted.items() if n in self.shards),
            self.mesh.tp,
            (self.mesh.group("tp"), self.mesh.group("pp")),
            self.mesh.device,
        )

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their global norm is at most `max_norm`; the norm before."""
        norm = self.gradient_norm()
        clip_gradients(list(self.parameters.values()), norm, max_norm)
        return norm

    # ---- one microbatch ----

    def _microbatch(
        self,
        program: Program,
        batch: Mapping[str, torch.Tensor],
        key: tuple[int, int],
        scale: float,
    ) -> Microbatch:
        device = self.mesh.device
        columns = {name: batch[name].to(device, non_blocking=True) for name in program.columns}
        step, number = key
        # The microbatch's place in the step over all replicas, as one process would count it.
        place = number * self.mesh.dp + self.mesh.dp_rank
        key_of_draws = (self._parts.seed, "microbatch", step, place)
        return Microbatch(program, columns, {}, key_of_draws, scale)

    def _derive(self, microbatch: Microbatch) -> Values:
        """Masks, position ids and the like, as far as this rank's stages read them."""
        program = microbatch.program
        return self._fixed_values(program) | self._run(program.derived, microbatch.columns)

    def _fixed_values(self, program: Program) -> Values:
        if id(program) not in self._fixed:
            self._fixed[id(program)] = self._run(program.fixed, {})
        return self._fixed[id(program)]

    def _run(self, prologue: SegmentProgram, columns: Mapping[str, torch.Tensor]) -> Values:
        if not prologue.segment.outputs:
            return {}
        buffers = next(iter(self._parts.stages.values())).buffers
        with torch.no_grad():
            values = prologue.function(
                *(buffers[name] for name in prologue.segment.buffers),
                *(columns[name] for name in prologue.segment.columns),
            )
        return dict(zip(prologue.segment.outputs, values, strict=True))

    # ---- handlers of steps ----

    def _compute(self, task: Compute) -> None:
        _ACTIONS[task.action.kind](self, task.action)

    def _send(self, task: Send) -> None:
        values = self._made.pop((task.payload, task.stage, task.microbatch))
        self._parts.transfers.send(task, list(values.values()))

    def _receive(self, task: Receive) -> None:
        assert self._state is not None
        program = self._state.microbatches[task.microbatch].program
        names = self._arriving_names(program, task.payload, task.stage)
        metas = [program.values[name] for name in names]
        self._parts.transfers.post(task, metas, self.mesh.device)

    def _reduce(self, task: ReduceGradients) -> None:
        self._parts.reducer.flush()

    def _step_optimizer(self, task: OptimizerStep) -> None:
        """The caller steps the optimizer, after clipping and its callbacks."""

    # ---- actions ----

    def _forward(self, action: Action) -> None:
        state = self._state
        assert state is not None
        stage, number = action.stage, action.microbatch
        microbatch = state.microbatches[number]
        if not microbatch.derived:
            microbatch.derived = self._derive(microbatch)
        received = self._arrived(microbatch.program, Payload.ACTIVATION, stage - 1, number)
        keep = not state.plan.schedule.recompute[stage]
        made = self._parts.stages[stage].forward(number, microbatch, received, keep)
        program = microbatch.program.stages[stage]
        if (loss := self._loss_made_by(stage, microbatch)) is not None:
            state.losses[number] = made[loss] * microbatch.scale
        if stage + 1 < self._num_stages:
            sent = {name: made[name] for name in program.sent}
            self._made[Payload.ACTIVATION, stage, number] = sent

    def _recompute(self, action: Action) -> None:
        assert self._state is not None
        microbatch = self._state.microbatches[action.microbatch]
        self._parts.stages[action.stage].recompute(action.microbatch, microbatch)

    def _backward(self, action: Action) -> None:
        stage = self._parts.stages[action.stage]
        is_last = self._is_last(action)

        def segment_done(segment: SegmentProgram) -> None:
            self._parts.tied.collect(segment, action.microbatch)
            stage.waiting.run(action.microbatch)
            if is_last:
                self._parts.reducer.ready(self._unshared(segment))

        self._run_backward(action, segment_done)
        self._complete(action.microbatch)

    def _input_gradient(self, action: Action) -> None:
        def segment_done(segment: SegmentProgram) -> None:
            self._parts.tied.collect(segment, action.microbatch)

        self._run_backward(action, segment_done)

    def _weight_gradient(self, action: Action) -> None:
        assert self._state is not None
        self._parts.stages[action.stage].waiting.run(action.microbatch)
        if self._is_last(action):
            program = self._state.microbatches[action.microbatch].program
            for segment in reversed(program.stages[action.stage].segments):
                self._parts.reducer.ready(self._unshared(segment))
        self._complete(action.microbatch)

    def _complete(self, number: int) -> None:
        """A stage has a microbatch's gradients; after the last one its derived values go."""
        assert self._state is not None
        self._state.stages_left[number] -= 1
        if self._state.stages_left[number] == 0:
            self._state.microbatches[number].derived = {}

    def _is_last(self, action: Action) -> bool:
        """Whether an action completes its stage's gradients of the step."""
        assert self._state is not None
        return self._state.last_backward[action.stage] == action.microbatch

    def _run_backward(self, action: Action, segment_done: Callable[[SegmentProgram], None]) -> None:
        state = self._state
        assert state is not None
        stage, number = action.stage, action.microbatch
        microbatch = state.microbatches[number]
        gradients = self._arrived(microbatch.program, Payload.GRADIENT, stage + 1, number)
        if (loss := self._loss_made_by(stage, microbatch)) is not None:
            dtype = microbatch.program.values[loss].dtype
            gradients[loss] = torch.full((), microbatch.scale, dtype=dtype, device=self.mesh.device)
        made = self._parts.stages[stage].backward(number, microbatch, gradients, segment_done)
        if stage > 0:
            self._made[Payload.GRADIENT, stage, number] = made

    @staticmethod
    def _loss_made_by(stage: int, microbatch: Microbatch) -> str | None:
        """The loss value's name, if a stage makes it."""
        loss = microbatch.program.loss
        made = microbatch.program.stages[stage].results.values()
        return loss if loss in made else None

    def _reduce_nothing(self) -> None:
        """Take part in the reductions of a step in which this replica has no microbatch."""
        for stage in sorted(self._parts.stages, reverse=True):
            for segment in reversed(self._parts.base.stages[stage].segments):
                self._parts.tied.skip(segment)
                self._parts.reducer.ready(self._unshared(segment))

    def _unshared(self, segment: SegmentProgram) -> list[torch.nn.Parameter]:
        shared = self._parts.shared
        return [self.parameters[n] for n in segment.segment.parameters if n not in shared]

    # ---- values between stages ----

    def _arrived(self, program: Program, payload: Payload, producer: int, number: int) -> Values:
        """What a neighbouring stage gave, from this rank or from another."""
        if not 0 <= producer < self._num_stages:
            return {}
        rank = self._parts.stage_rank[producer]
        if rank == self.mesh.pp_rank:
            return self._made.pop((payload, producer, number))
        tensors = self._parts.transfers.take(Receive(payload, producer, number, rank))
        return dict(zip(self._arriving_names(program, payload, producer), tensors, strict=True))

    def _arriving_names(self, program: Program, payload: Payload, producer: int) -> tuple[str, ...]:
        if payload is Payload.ACTIVATION:
            return program.stages[producer + 1].received
        return program.gradients_of(program.stages[producer - 1].sent)

    def _evaluate_stage(self, stage: int, number: int, microbatch: Microbatch) -> Values:
        parts = self._parts
        program = microbatch.program
        before = parts.stage_rank[stage - 1] if stage else self.mesh.pp_rank
        if before != self.mesh.pp_rank:
            task = Receive(Payload.ACTIVATION, stage - 1, number, before)
            metas = [program.values[name] for name in program.stages[stage].received]
            parts.transfers.post(task, metas, self.mesh.device)
        received = self._arrived(program, Payload.ACTIVATION, stage - 1, number)
        made = parts.stages[stage].evaluate(microbatch, received)
        if stage + 1 < self._num_stages:
            sent = {name: made[name] for name in program.stages[stage].sent}
            after = parts.stage_rank[stage + 1]
            if after == self.mesh.pp_rank:
                self._made[Payload.ACTIVATION, stage, number] = sent
            else:
                send = Send(Payload.ACTIVATION, stage, number, after)
                parts.transfers.send(send, list(sent.values()))
        return {name: made[value] for name, value in program.stages[stage].results.items()}


_HANDLERS: dict[type[Any], Callable[[Engine, Any], None]] = {
    Compute: Engine._compute,
    Send: Engine._send,
    Receive: Engine._receive,
    ReduceGradients: Engine._reduce,
    OptimizerStep: Engine._step_optimizer,
}

_ACTIONS: dict[Kind, Callable[[Engine, Action], None]] = {
    Kind.FORWARD: Engine._forward,
    Kind.RECOMPUTE: Engine._recompute,
    Kind.BACKWARD: Engine._backward,
    Kind.INPUT_GRADIENT: Engine._input_gradient,
    Kind.WEIGHT_GRADIENT: Engine._weight_gradient,
}
