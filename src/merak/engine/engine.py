"""The engine of one rank: trains and evaluates its stages together with the other ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from merak.core.errors import ScheduleError
from merak.core.random import own_random_state
from merak.core.shards import ParameterShard
from merak.core.tensor_meta import Signature
from merak.engine.comm.buffer_sync import sync_buffers
from merak.engine.comm.eval_parameters import fetch_remote
from merak.engine.comm.gradient_norm import clip_gradients
from merak.engine.comm.sparse_gradients import refuse_sparse_optimizer
from merak.engine.comm.stage_io import StageIO
from merak.engine.evaluation import evaluate_microbatch, start_gathers
from merak.engine.health.oom import StepAborted, agree, explain_oom
from merak.engine.health.step_records import StepRecord, gather_records
from merak.engine.indices import check_indices
from merak.engine.microbatches import Microbatches
from merak.engine.optimizer_step import gradient_norm
from merak.engine.parameter_writes import apply_parameter_writes
from merak.engine.stage import Microbatch
from merak.engine.state import EngineState
from merak.engine.tensors_by_name import TensorDict
from merak.engine.training_step import TrainingStep, Update
from merak.engine.zero.optimizer_params import OptimizerParams
from merak.graph.program.program import Program
from merak.plan.summary import idle_pipeline

_EVALUATE_LESS = (
    "use smaller batches to evaluate (per_device_eval_batch_size), or a larger pp or tp"
)


class Engine:
    """Trains and evaluates this rank's stages together with the other ranks.

    Args:
        state: see `engine.build.build_engine`.
    """

    def __init__(self, state: EngineState) -> None:
        self.mesh = state.mesh
        self.progress = state.progress
        self._state = state
        self._exchange = StageIO(state.transfers, state.mesh)
        self._microbatches = Microbatches(state.mesh, state.buffers, state.seed)

    @property
    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """This rank's parameters by name, with all that replicas have stepped."""
        self._state.optimizer_params.wait()
        return self._state.parameters

    def whole_model(self) -> AbstractContextManager[None]:
        """Inside, the user's model has this rank's parameters whole, also with zero=3.

        Called alike on all replicas. What is written into parameters inside is kept.
        """
        return self._state.optimizer_params.whole(self._state.model)

    @property
    def holds_first_stage(self) -> bool:
        """Whether this rank runs the first stage of an evaluation."""
        return self._state.stage_rank[0] == self.mesh.pp_rank

    @property
    def holds_last_stage(self) -> bool:
        """Whether this rank runs the last stage of an evaluation, where the loss is made."""
        return self._state.stage_rank[-1] == self.mesh.pp_rank

    @property
    def updates_inside(self) -> bool:
        """Whether a step's schedule is asynchronous: it steps the optimizer on its way."""
        return not self._state.plan_for.base.schedule.is_synchronous

    @property
    def needs_equal_replicas(self) -> bool:
        """Whether all replicas must have equally many microbatches in every training step."""
        return self.updates_inside or self._state.zero == 3

    def idle_pipeline(self, option: str) -> str | None:
        """A sentence for a user whose steps have too few microbatches for the pipeline.

        Args:
            option: what the user sets their number with.
        """
        return idle_pipeline(self._state.plan_for, option)

    def is_owner(self, name: str) -> bool:
        """Whether this rank's copy of a parameter counts (in norms, in checkpoints)."""
        return name in self._state.owned

    @property
    def shards(self) -> Mapping[str, ParameterShard]:
        """How parameters that are split over tp lie on the ranks."""
        return self._state.base.shards

    def held(self) -> frozenset[str]:
        """Names of the parameters, and of the buffers its segments read, that this rank holds."""
        return frozenset(self.parameters) | self._state.kept_buffers

    def columns(self, signature: Signature, training: bool = True) -> tuple[str, ...]:
        """The columns this rank reads of a batch."""
        return self._state.program_for(signature, training).columns

    def outputs(self, signature: Signature) -> tuple[str, ...]:
        """Names of the model's outputs in evaluation, in its order, wherever they are made."""
        return self._state.program_for(signature, False).outputs

    def train_step(
        self,
        step: int,
        signatures: Sequence[Signature],
        batches: Sequence[Mapping[str, torch.Tensor]],
        scale: float = 1.0,
        update: Update | None = None,
        loss_scale: float = 1.0,
    ) -> torch.Tensor:
        """Forward and backward of all microbatches.

        Gradients are final when it returns. Under an asynchronous schedule `update` has been called
        for each of its updates instead, with the mean of the update's microbatches as its
        gradients, and none are left.

        Args:
            step: the job's step number; keys the random draws.
            signatures: of each microbatch of this data parallel replica, the same on all ranks of
                its pipeline.
            batches: per microbatch, at least the columns this rank reads.
            scale: the factor of each microbatch's loss in the step's loss.
            update: steps the optimizer for those parameters of this rank that have a gradient.
            loss_scale: multiplies the gradients on their way, against underflow in fp16; they are
                divided by it before this returns.

        Returns:
            The microbatches' losses times `scale`, (number of microbatches,), float32, on every
            rank of the pipeline.

        Raises:
            ScheduleError: an asynchronous schedule without `update`, or whose replicas have
                different numbers of microbatches.
            DataError: a column with an index beyond the table that it is looked up in.
        """
        check_indices(self._state, f"step {step + 1}", signatures, batches, True)
        if self.updates_inside:
            self._check_asynchronous(len(signatures), update)
        if self._state.zero >= 2:
            # Where replicas have different numbers of microbatches, their sums wait for the end.
            most, least = self._counts(len(signatures))
            self._state.reducer.every_microbatch = most == least
            self._check_shared(most, least)
        apply_parameter_writes(self._state, self._programs(signatures, True), batches)
        while True:
            self._state.optimizer_params.start_step()
            written = self._written(signatures) if self._state.oom_guard.is_armed else {}
            try:
                with self.progress.step(step), own_random_state(self.mesh.device):
                    microbatches = [
                        self._microbatch(signature, batch, step, number, (scale, loss_scale))
                        for number, (signature, batch) in enumerate(
                            zip(signatures, batches, strict=True)
                        )
                    ]
                    with explain_oom(f"step {step} on {self._place}", self._advice()):
                        losses = self._run(microbatches, update, loss_scale)
                        self._state.replica_buffers.synchronize(tuple(signatures))
                        return losses
            except StepAborted as aborted:
                reasons = aborted.reasons
            self._undo(written)
            self._save_fewer(step, reasons)

    def _programs(self, signatures: Sequence[Signature], training: bool) -> list[Program]:
        """What runs for some microbatches; without any, what would for the usual ones."""
        found = [self._state.program_for(signature, training) for signature in signatures]
        return found or [self._state.base]

    def _run(
        self, microbatches: Sequence[Microbatch], update: Update | None, loss_scale: float
    ) -> torch.Tensor:
        """The microbatches of a step, once; their losses."""
        state, oom_guard = self._state, self._state.oom_guard
        plan = state.plan_for(max(len(microbatches), 1))
        oom_guard.start_step(self._release)
        try:
            run = TrainingStep(state, self._exchange, self._microbatches, plan, microbatches)
            if microbatches:
                run.run(update)
            else:
                run.run_empty()
            self._sum(run.losses)
            if not self.updates_inside:
                oom_guard.allocate(partial(state.optimizer_params.take_gradients, loss_scale))
            if oom_guard.is_armed:
                with self.progress.waiting("whether memory ran out on", self._others()):
                    agree(oom_guard, self.mesh)
        except BaseException:
            self.forget()
            raise
        return run.losses

    @property
    def _place(self) -> str:
        return f"pipeline position {self.mesh.pp_rank}"

    def _advice(self) -> str:
        """What to do when a step runs out of memory that cannot be run again."""
        least = "a larger pp or tp, or a smaller microbatch"
        if self.updates_inside:
            name = self._state.plan_for.base.schedule.name
            return (
                f"schedule={name!r} has updated weights by then, so that the step cannot be run "
                f"again; use recompute='full', {least}, or a synchronous schedule such as '1f1b' "
                "with recompute='auto'"
            )
        return f"use recompute='auto', which runs it again with fewer activations kept, {least}"

    def _others(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.mesh.world_size) if rank != self.mesh.rank)

    def _release(self) -> None:
        """Let go of the activations of all microbatches."""
        for stage in self._state.stages.values():
            stage.forget()

    def _written(self, signatures: Sequence[Signature]) -> TensorDict:
        """The buffers that a step writes, as they are now."""
        programs = [self._state.program_for(signature, True) for signature in set(signatures)]
        names = {
            name
            for program in programs
            for stage in program.stages.values()
            for segment in stage.segments
            for name in segment.written
        }
        return {n: buffer.clone() for n, buffer in self._state.buffers.items() if n in names}

    @torch.no_grad()
    def _undo(self, written: TensorDict) -> None:
        """Leave everything as it was before a step that was given up."""
        for name, before in written.items():
            self._state.buffers[name].copy_(before)
        self._state.optimizer_params.clear_gradients()

    def _save_fewer(self, step: int, reasons: Mapping[int, str]) -> None:
        assert self._state.save_fewer is not None
        plans, base = self._state.save_fewer(step, reasons)
        self._state = replace(self._state, plan_for=plans, base=base)

    def _sum(self, losses: torch.Tensor) -> None:
        group = self.mesh.group("pp")
        if group is not None:
            with self.progress.waiting("the sum of losses over pp with", self.mesh.peers("pp")):
                dist.all_reduce(losses, group=group)

    def _microbatch(
        self,
        signature: Signature,
        batch: Mapping[str, torch.Tensor],
        step: int,
        number: int,
        scales: tuple[float, float],
    ) -> Microbatch:
        program = self._state.program_for(signature, True)
        microbatch = self._microbatches.make(program, batch, step, number)
        microbatch.scale, microbatch.loss_scale = scales
        return microbatch

    def _check_asynchronous(self, num_microbatches: int, update: Update | None) -> None:
        name = self._state.plan_for.base.schedule.name
        if update is None:
            raise ScheduleError(
                f"schedule={name!r} updates the weights inside a step; give the engine an "
                "optimizer, or use a synchronous schedule such as '1f1b'."
            )
        most, least = self._counts(num_microbatches)
        if most != least:
            raise ScheduleError(
                f"schedule={name!r} updates the weights after every few microbatches on all "
                f"replicas together, but they have {least} to {most} in this step; leave the last "
                "part of an epoch out (dataloader_drop_last=True)."
            )

    def _check_shared(self, most: int, least: int) -> None:
        if self._state.zero == 3 and most != least:
            raise ScheduleError(
                f"zero=3 gathers parameters on all replicas together, but they have {least} to "
                f"{most} microbatches here; leave the last part of an epoch out "
                "(dataloader_drop_last=True), or use zero=2."
            )

    def _counts(self, num_microbatches: int) -> tuple[int, int]:
        """The most and the least microbatches that a replica has in this step."""
        group = self.mesh.group("dp")
        if group is None:
            return num_microbatches, num_microbatches
        counts = torch.tensor([num_microbatches, -num_microbatches], device=self.mesh.device)
        with self.progress.waiting("the number of microbatches on", self.mesh.peers("dp")):
            dist.all_reduce(counts, dist.ReduceOp.MAX, group=group)
        return int(counts[0]), -int(counts[1])

    def forget(self) -> None:
        """Drop what a step or evaluation that failed has left, so that the next one starts clean.

        Peers must have failed alike: transfers that only one side has begun stay unmatched.
        """
        state = self._state
        for stage in state.stages.values():
            stage.forget()
        self._exchange.forget()
        state.reducer.forget()
        state.tied.forget()
        if state.fsdp is not None:
            state.fsdp.forget()

    def evaluate(
        self,
        signatures: Sequence[Signature],
        batches: Sequence[Mapping[str, torch.Tensor]],
    ) -> list[TensorDict]:
        """Forward of some microbatches, without randomness or gradients.

        Args:
            signatures: as in `train_step`.
            batches: as in `train_step`.

        Returns:
            Per microbatch the model's outputs by name that this rank's stages make.

        Raises:
            DataError: as in `train_step`.
        """
        check_indices(self._state, "an evaluation", signatures, batches, False)
        apply_parameter_writes(self._state, self._programs(signatures, False), batches)
        results = []
        try:
            programs = [self._state.program_for(s, False) for s in signatures]
            rest: list[tuple[str, ...]] = []
            if self._state.fsdp is not None:
                rest = start_gathers(self._state, programs, self._counts(len(programs))[0])
            state = self._state
            sync_buffers(state.mesh, state.buffers, programs, state.progress)
            state.optimizer_params.wait()  # for what others are to read
            remote = fetch_remote(state.mesh, state.parameters, programs, state.progress)
            with own_random_state(self.mesh.device):
                for number, (signature, batch) in enumerate(zip(signatures, batches, strict=True)):
                    what = f"the evaluation of a microbatch on {self._place}"
                    with self.progress.evaluation(number), explain_oom(what, _EVALUATE_LESS):
                        results.append(self._evaluate(number, signature, batch, remote))
            self._exchange.finish()
            for names in rest:
                assert self._state.fsdp is not None
                self._state.fsdp.begin(names)
                self._state.fsdp.end(names)
            self._state.replica_buffers.evaluated(programs)
        except BaseException:
            self.forget()
            raise
        return results

    def _evaluate(
        self,
        number: int,
        signature: Signature,
        batch: Mapping[str, torch.Tensor],
        remote: TensorDict,
    ) -> TensorDict:
        program = self._state.program_for(signature, False)
        microbatch = self._microbatches.make(program, batch, 0, number)
        microbatch.remote = remote
        self._microbatches.derive(microbatch)
        return evaluate_microbatch(self._state, self._exchange, number, microbatch)

    def recorded_steps(self) -> tuple[StepRecord, ...]:
        """The last training steps as they ran; called alike on all ranks of a pipeline.

        Returns:
            Steps, oldest first, with every rank's actions on the clock of the pipeline's first
            rank; `merak.schedule.simulator.timeline.measured_timeline` draws them.
        """
        return gather_records(self.progress.records, self.mesh)

    def check_optimizer(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Refuse an optimizer that cannot step this layout's gradients.

        Args:
            optimizer: of this rank's parameters; None for none.

        Raises:
            ScheduleError: it takes sparse gradients alone, and there are dense ones.
        """
        refuse_sparse_optimizer(optimizer, self._state.densified)

    @property
    def optimizer_params(self) -> OptimizerParams:
        """What this rank's optimizer steps; it has the gradients once `train_step` returns."""
        return self._state.optimizer_params

    def gradient_norm(self) -> torch.Tensor:
        """The global 2-norm of the gradients, a scalar, the same on every rank."""
        return gradient_norm(self._state)

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their global norm is at most `max_norm`; the norm before."""
        norm = self.gradient_norm()
        clip_gradients(
            [item.tensor for item in self.optimizer_params.items.values()], norm, max_norm
        )
        return norm
