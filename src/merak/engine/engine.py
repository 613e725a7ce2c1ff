"""The engine of a rank: trains and evaluates its stages together with the other ranks."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from merak.core.errors import ArgumentsError, TrainingError
from merak.core.mesh import REPLICAS
from merak.core.precision import refuse_inference_mode
from merak.core.random import own_random_state
from merak.core.rank0 import warn_once
from merak.core.shards import ParameterShard
from merak.core.tensor_meta import Signature
from merak.engine.comm.buffer_sync import sync_buffers
from merak.engine.comm.compression.stages import GradientCompression
from merak.engine.comm.eval_parameters import fetch_remote
from merak.engine.comm.gradient_norm import clip_gradients
from merak.engine.comm.local_steps import LocalSteps
from merak.engine.health.oom import StepAborted, explain_oom, raise_if_aborted
from merak.engine.health.step_records import StepRecord, gather_records
from merak.engine.oom_replan import replan, restore, written_buffers
from merak.engine.optimizer.connection import OptimizerConnections
from merak.engine.stage import Microbatch
from merak.engine.state import EngineState
from merak.engine.step.evaluation import evaluate, pad_microbatches
from merak.engine.step.host_reads import replay_losses
from merak.engine.step.non_finite import NonFiniteFinder, describe, non_finite_gradients
from merak.engine.step.optimizer_step import StepEnd, StepNumbers, gradient_norm, runs_behind
from merak.engine.step.parameter_writes import apply_parameter_writes
from merak.engine.step.replica_check import check_replicas
from merak.engine.step.step_checks import (
    check_indices,
    compare_microbatches,
    make_programs,
    microbatch_counts,
)
from merak.engine.step.training_step import TrainingStep, Update
from merak.engine.step.undo import StepUndo
from merak.engine.tensors_by_name import TensorDict
from merak.engine.zero.optimizer_params import OptimizerParams
from merak.graph.program.program import Program
from merak.graph.weights.gather_weights import gather_state_dict, whole_copy
from merak.graph.weights.laid_out import LastWeights, Part, is_in_parts, methods_allowed
from merak.graph.weights.sharded import ShardWatch, note_who_asks_for_layout
from merak.plan.summary import idle_pipeline

logger = logging.getLogger(__name__)

_EVALUATED = "the evaluation of a microbatch on pp rank {}"
_EVALUATE_LESS = (
    "use smaller batches to evaluate (per_device_eval_batch_size), or a larger pp or tp"
)


class Engine:
    """Trains and evaluates this rank's stages together with the other ranks.

    Args:
        state: its parts; `build_engine` makes them.
    """

    def __init__(self, state: EngineState) -> None:
        self.mesh = state.mesh
        self.progress = state.progress
        # Of the model, before its forward was traced; for checkpoints.
        self.description: Mapping[str, Any] = {}
        # Refuses hooks on gradients that a script has registered meanwhile and that would not run.
        self.check_hooks: Callable[[], None] = lambda: None
        self.watch = ShardWatch()
        self.optimizers = OptimizerConnections(state, self.watch)
        self.last_weights = LastWeights()
        self._state = state
        self._undo = StepUndo()
        self.steps_early = False
        """Whether the optimizer, in host memory, may step tensors while the backward runs.

        The loop then steps it after each training step, by the same gradients and options. Of a
        delayed one, what it has stepped goes to the device meanwhile.
        """
        self._is_retired = False
        self._update_norm = torch.zeros((), device=state.mesh.device)
        self._reads: list[TensorDict] = []

    @property
    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """This rank's parameters by name, up to date with the other replicas' optimizer steps."""
        self._state.optimizer_params.wait()
        return self._state.parameters

    @contextmanager
    def whole_model(self) -> Iterator[None]:
        """Context in which the user's model has parameters unsharded over dp, also with zero=3.

        All replicas call it together, with the parameters that all updates make. What is written
        into parameters inside stays.
        """
        self._refuse_retired()
        self.complete_updates()
        model = self._state.model
        with self._state.optimizer_params.unsharded(model), methods_allowed(model):
            yield

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Context in which parameters are their averages; all ranks enter and leave it together.

        Raises:
            ArgumentsError: none are kept.
        """
        self._refuse_retired()
        if self._state.ema_decay is None:
            raise ArgumentsError(
                "this job keeps no averages of its parameters; give ema_decay, such as 0.999."
            )
        self.complete_updates()
        aside = self.last_weights.set_aside("parameters are their averages")
        with aside, self.optimizers.averaged():
            yield

    @property
    def part(self) -> Part:
        """The part of the model that this rank has."""
        is_sharded = self._state.fsdp is not None
        engine, last = weakref.ref(self), self.last_weights
        return Part(self.held(), self.shards, self.mesh, is_sharded, engine, last)

    def retire(self) -> None:
        """Retire this engine: another one is about to train its model."""
        self.optimizers.close()
        self.watch.close()
        self._is_retired = True

    def _refuse_retired(self) -> None:
        if self._is_retired:
            raise TrainingError(
                "another trainer (or merak.parallelize) was given this trainer's model, and has "
                "its weights now; go on with that one."
            )

    def gather_state_dict(self) -> dict[str, torch.Tensor]:
        """The whole model's state dict on rank 0, on the CPU; all ranks call it together.

        Returns:
            Parameters and persistent buffers by name; nothing on other ranks.
        """
        with self.whole_model():
            return gather_state_dict(self._state.model, self.part)

    def whole_copy(self) -> nn.Module:
        """A copy of the model with all weights on every rank; all ranks call it together.

        A model of which every rank has everything is not copied.
        """
        with self.whole_model():
            model, part = self._state.model, self.part
            if not is_in_parts(part):
                return model
            return whole_copy(model, part, part.mesh.device)

    def complete_updates(self) -> None:
        """Give all replicas the parameters that all updates make; they call it together.

        It ends a round of Local SGD, and the delay of an update (`delay_optimizer_update`).
        """
        state = self._state
        if state.local_steps is not None and state.local_steps.end_round():
            state.optimizer_params.sync_model_params()
        with self.watch.paused():
            state.optimizer_params.end_delay()

    def end_round(self) -> None:
        """Call `complete_updates`, of which this is the former name; a warning says so."""
        warn_once(logger, "Engine.end_round is today called complete_updates.")
        self.complete_updates()

    @property
    def local_steps(self) -> LocalSteps | None:
        """The rounds of Local SGD; None where replicas reduce gradients in every step."""
        return self._state.local_steps

    @property
    def holds_last_stage(self) -> bool:
        """Whether this rank runs the last stage of an evaluation, which computes the loss."""
        return self._state.stage_rank[-1] == self.mesh.pp_rank

    @property
    def evaluates_at_once(self) -> bool:
        """Whether replicas run an evaluation's microbatches together, whoever takes outputs.

        They gather each other's parameters (ZeRO 3), or compute rows for each other's experts.
        """
        return self._state.fsdp is not None or self.mesh.spreads_experts

    @property
    def updates_inside(self) -> bool:
        """Whether the schedule is asynchronous: a step updates the weights several times inside."""
        return not self._state.plan_for.base.schedule.is_synchronous

    @property
    def meets_replicas(self) -> bool:
        """Whether a microbatch of training takes rows from those of other replicas."""
        return self._state.program_for.meets_replicas

    @property
    def needs_equal_replicas(self) -> bool:
        """Whether all replicas must have equally many microbatches in every training step."""
        together = self._state.zero == 3 or self.meets_replicas
        return self.updates_inside or together or self.mesh.spreads_experts

    def idle_pipeline(self, option: str) -> str | None:
        """A warning for a user whose steps have too few microbatches to keep the pipeline busy.

        Args:
            option: the argument that sets their number.
        """
        return idle_pipeline(self._state.plan_for, option)

    @property
    def shards(self) -> Mapping[str, ParameterShard]:
        """The shards over tp of this rank's parameters, by name.

        A script that asks for them computes with shards as they are: nothing of it is refused.
        """
        note_who_asks_for_layout()
        return self._state.base.shards

    def held(self) -> frozenset[str]:
        """Names of the parameters that this rank holds, and of the buffers that it answers for."""
        return frozenset(self.parameters) | self._state.kept_buffers

    def stage_sizes(self) -> dict[int, int]:
        """Number of segments of each of this rank's stages."""
        stages = self._state.base.stages
        return {number: len(stage.segments) for number, stage in stages.items()}

    def columns(self, signature: Signature, training: bool = True) -> tuple[str, ...]:
        """The columns of a batch that this rank reads."""
        self._state.program_for.refresh()
        return self._state.program_for.columns(signature, training)

    @property
    def queried_masks(self) -> Collection[str]:
        """Columns of a batch whose ones make another program."""
        return self._state.program_for.queried

    def outputs(self, signature: Signature) -> tuple[str, ...]:
        """Names of the model's outputs in evaluation, in its order, of all ranks."""
        self._state.program_for.refresh()
        return self._state.program_for(signature, False).outputs

    def changed_state(self) -> dict[str, str]:
        """Python state that has changed since the model was traced, for ranks to compare.

        Where it is the same on all of them, they make their programs anew together.
        """
        programs = self._state.program_for
        found = programs.state.described()
        if programs.state.is_stale:
            programs.prepared.clear()
        return found

    def train_step(
        self,
        step: int,
        signatures: Sequence[Signature],
        batches: Sequence[Mapping[str, torch.Tensor]],
        scale: float = 1.0,
        update: Update | None = None,
        loss_scale: float | torch.Tensor = 1.0,
        of_all: Collection[Signature] | None = None,
    ) -> torch.Tensor:
        """Run forward and backward of all microbatches, and reduce their gradients.

        Gradients are final when it returns. Under an asynchronous schedule `update` has been called
        for each of its updates instead, with the mean of the update's microbatches as its
        gradients, and none are left.

        Args:
            step: the job's step number, which keys the random state.
            signatures: of each microbatch of this replica, the same on all ranks of its pipeline.
            batches: per microbatch, at least the columns this rank reads.
            scale: the factor of each microbatch's loss in the step's loss.
            update: steps the optimizer for those parameters of this rank that have a gradient.
            loss_scale: multiplies the gradients in backward, against underflow in fp16, a number or
                a scalar on the device; they are divided by it before this returns.
            of_all: of every replica's microbatches, the same on all ranks, so that they need not
                ask each other whether one has a new shape; None where a replica knows its own.

        Returns:
            The microbatches' losses times `scale`, (number of microbatches,), float32, on every
            rank of the pipeline.

        Raises:
            ScheduleError: an asynchronous schedule without `update`, or with unequal replicas.
            RefusedBatchError: the model cannot be traced for a replica's microbatch; on all ranks,
                before anything has run, so that they may save.
            DataError: a column with an index beyond the table that it is looked up in.
            TrainingError: another engine has been given the model.
            ArgumentsError: `torch.inference_mode` is around this call.
        """
        self._refuse_retired()
        refuse_inference_mode()
        state = self._state
        make_programs(state, signatures, True, of_all)
        self.last_weights.forget("it has been trained since weights were last saved")
        if state.layer_dropping is not None:
            state.layer_dropping.start_step(step, state.buffers)
        batches = self._with_numbers(batches)
        check_indices(state, f"step {step + 1}", signatures, batches, True)
        compare_microbatches(state, signatures, update is not None)
        apply_parameter_writes(state, self._programs(signatures, True), batches)
        while True:
            self._state.optimizer_params.start_step()
            written = written_buffers(self._state, signatures)
            self._undo.note(step, written, with_previous=self.reads_late)
            try:
                return self._attempt(step, signatures, batches, scale, update, loss_scale)
            except StepAborted as aborted:
                reasons = aborted.reasons
            restore(self._state, written)
            self._state = replan(self._state, step, reasons)

    def _attempt(  # as of `train_step`
        self,
        step: int,
        signatures: Sequence[Signature],
        batches: Sequence[Mapping[str, torch.Tensor]],
        scale: float,
        update: Update | None,
        loss_scale: float | torch.Tensor,
    ) -> torch.Tensor:
        """Run a training step, which may be aborted."""
        with (
            self.watch.paused(),
            self.progress.step(step),
            own_random_state(self.mesh.device),
            explain_oom(f"step {step} on pp rank {self.mesh.pp_rank}", self._advice()),
        ):
            microbatches = []
            for number, (signature, batch) in enumerate(zip(signatures, batches)):
                program = self._state.program_for(signature, True)
                made = self._state.microbatches.make(program, batch, step, number)
                made.scale, made.loss_scale = scale, loss_scale
                microbatches.append(made)
            losses = self._run(microbatches, update, loss_scale)
            self._state.replica_buffers.synchronize(tuple(signatures))
            return losses

    def replay_losses(self, signatures: Sequence[Signature], own: Sequence[int]) -> None:
        """Run the loss again for what it does besides, after the last training step.

        All ranks call it together, and each runs it for the microbatches of all replicas.

        Args:
            signatures: of these microbatches, in the order of one process.
            own: which of them this replica has run.
        """
        reads, self._reads = dict(zip(own, self._reads, strict=True)), []
        replay_losses(self._state, signatures, reads, self.all_reduce)

    def replay_evaluated(self, signature: Signature, outputs: Mapping[str, torch.Tensor]) -> None:
        """Run the loss again for what it does besides, after a batch has been evaluated.

        Args:
            signature: of the batch.
            outputs: on the host, also those that the loss reads.
        """
        program = self._state.program_for(signature, False)
        if program.replay is not None:
            model, device = self._state.model, self.mesh.device
            program.replay(model, dict(signature), outputs, device)

    @property
    def reads_late(self) -> bool:
        """Whether a step that is not finite may be found one step late: the device leaves it out.

        Its host then never waits for a step that runs. That takes a device that runs behind it, and
        optimizers whose kernels skip a step by themselves.
        """
        state = self._state
        is_plain = state.local_steps is None and self.compression is None
        can_mask = is_plain and not self.updates_inside and self.optimizers.can_mask
        return can_mask and runs_behind(self.mesh.device)

    def mask_step(self, end: StepEnd) -> None:
        """Mask the last training step on the device if it was not finite.

        Args:
            end: of the step, whose optimizer has not been stepped yet.
        """
        self.optimizers.mask(end.non_finite)
        self._undo.mask(self._state, end)

    def discard_step(self, found: StepNumbers) -> None:
        """Undo the last training step, which was not finite; an optimizer then changes nothing."""
        self._undo.discard(self._state, found)

    @property
    def compression(self) -> GradientCompression | None:
        """The compression of gradient reductions, whose state checkpoints hold; None for none."""
        return self._state.reducer.compression

    def locate_non_finite(
        self,
        step: int,
        signatures: Sequence[Signature],
        batches: Sequence[Mapping[str, torch.Tensor]],
        scale: float = 1.0,
        loss_scale: float | torch.Tensor = 1.0,
    ) -> str:
        """Run a training step once more, and find where it was first not finite.

        All ranks call it together, with the weights that the step had. Afterwards buffers are as
        they were, and gradients those of the step after it, if that has run.

        Args:
            step: as of `train_step`; the last one, or the one before where `reads_late`.
            signatures: as of `train_step`.
            batches: as of `train_step`.
            scale: as of `train_step`.
            loss_scale: as of `train_step`.

        Returns:
            The end of a sentence, the same on every rank.
        """
        state = self._state
        batches = self._with_numbers(batches)
        finder = NonFiniteFinder(self._programs(signatures, True)[0].loss)
        with self._undo.before(state, step):
            try:
                with finder.watching(state):
                    losses = self._attempt(step, signatures, batches, scale, None, loss_scale)
            except StepAborted:
                return "and memory ran out when the step ran once more to find the operator"
            gradients = non_finite_gradients(state.optimizer_params)
        found = finder.first(finite_loss=True), finder.first(finite_loss=False)
        has_finite_loss = bool(torch.isfinite(losses).all())
        ranks = state.gather((found, gradients, has_finite_loss), "what was not finite first on")
        finite = all(rank[2] for rank in ranks)
        origins = [rank[0][0 if finite else 1] for rank in ranks]
        return describe(origins, {name for rank in ranks for name in rank[1]}, self.mesh.dp)

    def _with_numbers(
        self, batches: Sequence[Mapping[str, torch.Tensor]]
    ) -> list[Mapping[str, torch.Tensor]]:
        """Batches with the Python numbers that are inputs of the graphs."""
        numbers = self._state.program_for.state.columns()
        return [{**batch, **numbers} for batch in batches] if numbers else list(batches)

    def _programs(self, signatures: Sequence[Signature], training: bool) -> list[Program]:
        """The programs of some microbatches; without any, the program of an ordinary one."""
        found = [self._state.program_for(signature, training) for signature in signatures]
        return found or [self._state.base]

    def _run(
        self,
        microbatches: Sequence[Microbatch],
        update: Update | None,
        loss_scale: float | torch.Tensor,
    ) -> torch.Tensor:
        """The losses of a step's microbatches, which run once."""
        state, oom_guard = self._state, self._state.oom_guard
        plan = state.plan_for(max(len(microbatches), 1))
        oom_guard.start_step(self._release)
        if self.compression is not None:
            self.compression.start_step(float(loss_scale))
        if self.steps_early and not self.updates_inside and not oom_guard.is_armed:
            state.optimizer_params.begin_early_steps()
        try:
            run = TrainingStep(state, plan, microbatches)
            if microbatches:
                with state.transfers.route.step(True, state.program_for.num_made):
                    run.run(update)
            else:
                run.run_empty()
            self.all_reduce(run.losses, "pp", "losses")
            self._reads = run.reads
            if self.updates_inside:
                self._update_norm = run.update_norm
            if not self.updates_inside:
                local = state.local_steps  # whose gradients are of one replica, not of all
                divisor = loss_scale if local is None else loss_scale / local.num_replicas
                oom_guard.allocate(partial(state.optimizer_params.take_gradients, divisor))
            if oom_guard.is_armed:
                others = tuple(r for r in range(self.mesh.world_size) if r != self.mesh.rank)
                with self.progress.waiting("whether memory ran out on", others):
                    raise_if_aborted(oom_guard, self.mesh)
        except BaseException:
            self.forget()
            raise
        return run.losses

    def _advice(self) -> str:
        """The fix for a step that runs out of memory and cannot be run again."""
        least = "a larger pp or tp, or a smaller microbatch"
        if self.updates_inside:
            name = self._state.plan_for.base.schedule.name
            return (
                f"schedule={name!r} has updated weights by then, so that the step cannot be run "
                f"again; use recompute='full', {least}, or a synchronous schedule such as '1f1b' "
                "with recompute='auto'"
            )
        return f"use recompute='auto', which runs it again with fewer activations saved, {least}"

    def _release(self) -> None:
        """Free the activations of all microbatches."""
        for stage in self._state.stages.values():
            stage.forget()

    def all_reduce(self, tensor: torch.Tensor, axis: str, what: str) -> None:
        """Sum a tensor over an axis of the mesh, in place; its ranks call it together.

        Args:
            tensor: this rank's summand.
            axis: of the mesh.
            what: the tensor as a noun, which the watchdog names while ranks wait for it.
        """
        group = self.mesh.group(axis)
        if group is not None:
            waited = f"the sum of {what} over {axis} with"
            with self.progress.waiting(waited, self.mesh.peers(axis)):
                dist.all_reduce(tensor, group=group)

    def forget(self) -> None:
        """Free the state of a step or evaluation that failed, so that the next one starts clean.

        All ranks must have failed: transfers that only one side has begun stay unmatched.
        """
        state = self._state
        for stage in state.stages.values():
            stage.forget()
        state.stage_io.forget()
        state.reducer.forget()
        state.tied.forget()
        if state.fsdp is not None:
            state.fsdp.forget()

    def evaluate(
        self,
        signatures: Sequence[Signature],
        batches: Sequence[Mapping[str, torch.Tensor]],
    ) -> list[TensorDict]:
        """The outputs of some microbatches, as `evaluate_each` yields them, all at once."""
        return list(self.evaluate_each(signatures, batches))

    def evaluate_each(
        self,
        signatures: Sequence[Signature],
        batches: Sequence[Mapping[str, torch.Tensor]],
        of_all: Collection[Signature] | None = None,
        only_loss: bool = False,
    ) -> Iterator[TensorDict]:
        """Run the forward of microbatches in turn, without gradients; all ranks take everything.

        Stages run ahead to keep the last one busy, and hold the outputs of one; with ZeRO 3 of all.

        Args:
            signatures: as in `train_step`.
            batches: as in `train_step`.
            of_all: as in `train_step`.
            only_loss: whether no output but the loss is wanted: a head in chunks makes no logits.

        Yields:
            Per microbatch the model's outputs by name that this rank's stages compute.

        Raises:
            RefusedBatchError, DataError, TrainingError: as in `train_step`.
        """
        self._refuse_retired()
        state, num_own = self._state, len(signatures)
        make_programs(state, signatures, False, of_all, only_loss)
        self.complete_updates()
        check_indices(state, "an evaluation", signatures, batches, False, only_loss)
        if self.mesh.spreads_experts:
            signatures, batches = pad_microbatches(state, signatures, batches)
        batches = self._with_numbers(batches)
        programs = [state.program_for(signature, False, only_loss) for signature in signatures]
        apply_parameter_writes(state, programs or [state.base], batches)
        most = len(programs) if state.fsdp is None else microbatch_counts(state, len(programs))[0]
        try:
            sync_buffers(state.mesh, state.buffers, programs, state.progress)
            state.optimizer_params.wait()  # for what others are to read
            remote = fetch_remote(state.mesh, state.parameters, programs, state.progress)

            def microbatch(number: int) -> Microbatch:
                made = state.microbatches.make(programs[number], batches[number], 0, number)
                made.remote = remote
                return made

            running = evaluate(state, programs, most, microbatch)
            with state.transfers.route.step(False, state.program_for.num_made):
                for number in range(len(programs) + 1):  # the last time for what is left to do
                    with (
                        self.watch.paused(),
                        own_random_state(self.mesh.device),
                        self.progress.evaluation(),
                        explain_oom(_EVALUATED.format(self.mesh.pp_rank), _EVALUATE_LESS),
                    ):
                        made = list(islice(running, 1))
                    if number < num_own:
                        yield made.pop()  # and hold it no longer
            state.replica_buffers.evaluated(programs)
        except BaseException:
            self.forget()
            raise

    def check_replicas(self, when: str) -> None:
        """Refuse to go on where copies of a parameter differ; all ranks call it together."""
        check_replicas(self._state, when)

    def recorded_steps(self) -> tuple[StepRecord, ...]:
        """The measured actions of the last training steps; a pipeline's ranks call it together.

        Returns:
            Steps, oldest first, with every rank's actions on the clock of the pipeline's first
            rank; `merak.schedule.simulator.timeline.measured_timeline` draws them.
        """
        return gather_records(self.progress.records, self.mesh)

    def gather(self, value: Any, what: str) -> list[Any]:
        """Gather a value of every rank of the job, by rank; all ranks call it together.

        Args:
            value: this rank's, which must pickle.
            what: the value as a noun, which the watchdog names while ranks wait for it.
        """
        return self._state.gather(value, what)

    def connect_optimizer(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Connect an optimizer to the model; see `OptimizerConnections.connect`."""
        self.optimizers.connect(optimizer)

    @property
    def optimizer_params(self) -> OptimizerParams:
        """The tensors of this rank's optimizer; they have gradients once `train_step` returns."""
        return self._state.optimizer_params

    def gradient_norm(self) -> torch.Tensor:
        """The global 2-norm of the gradients, a scalar, the same on every rank.

        Under Local SGD it is that of this replica's gradients; or NaN if some replica's is not
        finite.
        Of a step under an asynchronous schedule, which leaves no gradients, it is 0; or NaN if a
        gradient of one of its updates was not finite.
        """
        local = self._state.local_steps
        if not self.updates_inside:
            norm = gradient_norm(self._state)
            return norm if local is None else local.agree_on_finite(norm)
        for axis in ("tp", "pp", REPLICAS):
            self.all_reduce(self._update_norm, axis, "norms of updates")
        return self._update_norm

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients to a global norm of at most `max_norm`.

        Returns:
            The norm before, a scalar, the same on every rank.
        """
        norm = self.gradient_norm()
        clip_gradients(
            [item.tensor for item in self.optimizer_params.items.values()], norm, max_norm
        )
        return norm
