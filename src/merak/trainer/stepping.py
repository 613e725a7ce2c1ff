"""The data flow of a batch in the trainer: from transformers' loop into the engine, and back.

`get_batch_samples` takes a step's microbatches from the loader and exchanges their shapes with the
other ranks. The loop hands them to `training_step` one by one, where `_prepare_inputs` may change
their values; the last one starts the pipeline, which runs all of them. `_clip_grad_norm` and
`_get_grad_norm` then ask the engine for the norm over all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache  # type: ignore[import-untyped]
from torch import nn
from transformers.trainer_utils import SaveStrategy, TrainOutput

from merak.core.announce import announce
from merak.core.errors import TrainingError
from merak.core.health.preemption import TERMINATED, has_saved, must_stop, saves_on_sigterm
from merak.core.health.status import phase
from merak.core.tensor_meta import Signature
from merak.data.digest import digests_of
from merak.engine.planning.replan import PlanWatch
from merak.engine.rank_arguments import step_options
from merak.engine.step.last_step import LastStep, OpenStep
from merak.engine.step.optimizer_step import StepNumbers
from merak.trainer.checkpoints.rollback import Rollbacks
from merak.trainer.checkpoints.saving import Saving
from merak.trainer.health.not_finite import LearningRates, SkippedSteps, StepLoss
from merak.trainer.planning.replan import LayoutChange
from merak.trainer.step_inputs import StepInputs
from merak.trainer.subclass.methods import describe, overriding
from merak.trainer.tokens import TOKENS, TokenCounter
from merak.trainer.unsupported import steps_beside_backward


@dataclass(frozen=True, slots=True)
class _Ran:
    """What the last training step of the engine ran with; see `Engine.train_step`."""

    step: int
    signatures: Sequence[Signature]
    batches: Sequence[Mapping[str, torch.Tensor]]
    scale: float
    loss_scale: float | torch.Tensor


class Stepping(Saving):
    """The part of `MerakTrainer` that runs training steps."""

    _rollbacks: Rollbacks
    _ran: _Ran | None = None
    # The last step, and the learning rates before it, until it is known whether it was finite.
    _last_step: LastStep
    _rates: LearningRates
    _is_alone: bool
    _has_shared_groups: bool = False  # in the optimizers of all ranks
    _traced_loss: tuple[object, ...] = ()
    _counter: TokenCounter | None = None
    _skipped: SkippedSteps
    # The step that runs, and the losses of its microbatches once it has run.
    _step: StepInputs | None = None
    _losses: torch.Tensor
    # Whether no optimizer has stepped the gradients of the microbatches that ran last.
    _is_left_over: bool = False
    _flops_per_token: float = 0.0
    # Whether the loss reads the step's label tokens.
    _divides_by_count: bool
    # Compares the first steps with a plan that was searched.
    _plan_watch: PlanWatch | None = None

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train, and on SIGTERM stop before a step that all ranks agree on."""
        with saves_on_sigterm(self.args.sigterm_limit_s):
            output = super().train(*args, **kwargs)
        if self.engine is not None:
            self.engine.complete_updates()
        return output

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Start from the state of a checkpoint, if any, and say if nothing is left to train."""
        epochs, batches = super()._init_training_state(*args, **kwargs)
        step, num_steps = self.state.global_step, self.state.max_steps
        self._saved_step, self._is_left_over = step, False
        if self._plan_watch is not None:
            self._plan_watch.start(step)
        if self._recorder is not None:
            self._recorder.start(step)
        if self._is_finished():
            announce("resumed after step %s of %s: no step is left to train", step, num_steps)
        elif step:
            announce("resumed after step %s of %s", step, num_steps)
        return epochs, batches

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Train an epoch, unless all steps are done: transformers would look after one more."""
        if self._is_finished():
            self.control.should_training_stop = True
        else:
            assert self.engine is not None
            self.engine.check_hooks()  # which callbacks may have registered by now
            super()._run_epoch(*args, **kwargs)  # type: ignore[no-untyped-call]

    def _is_finished(self) -> bool:
        return bool(0 < self.state.max_steps <= self.state.global_step)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        self._saved_step = self.state.global_step
        self._rollbacks.add(self._checkpoint_place(trial))

    def _stop_on_sigterm(self) -> None:
        """Save a checkpoint of the last step where all ranks stop now, and end the process."""
        if not must_stop():
            return
        step, run = self.state.global_step, self._run_place()
        if step > self._saved_step and self.args.save_strategy != SaveStrategy.NO:
            self._save_checkpoint(self.model, None)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        self._saver.wait()
        has_saved()
        has = f"{run} has its checkpoint" if step == self._saved_step else "nothing is saved"
        announce("SIGTERM has ended the job after step %s; %s", step, has)
        raise SystemExit(TERMINATED)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | int | None]:
        """The step's microbatches for the loop, whose shapes all ranks exchange, and label tokens.

        Args:
            epoch_iterator: this rank's columns of this replica's microbatches.
            num_batches: microbatches of a step.
            device: where a single process counts.
        """
        self._stop_on_sigterm()
        self._refuse_other_loss()
        batches = list(islice(epoch_iterator, num_batches))
        assert self._batch_exchange is not None and self._counter is not None
        metadata = [self._counter.metadata(batch) for batch in batches]
        samples = [digests_of(batch) for batch in batches]
        assert self.engine is not None
        state = dict(self.engine.changed_state())
        if self._has_shared_groups:
            state |= step_options(self._inner_optimizer())
        of_script = ("get_batch_samples", "_prepare_inputs", "training_step")
        exchanged = self._batch_exchange.exchange(
            batches,
            metadata,
            samples,
            state,
            may_change=any(overriding(self, name) is not None for name in of_script),
            masks=self.engine.queried_masks,
        )
        self._step = StepInputs(batches, exchanged)  # which transformers' loop iterates
        across = self.args.average_tokens_across_devices
        replicas = range(self.mesh.dp) if across else (self.mesh.dp_rank,)
        rows = exchanged.metadata
        counts = [row[r]["labels"] for row in rows for r in replicas if "labels" in row[r]]
        # On the host: the engine sends it with the columns, and nothing waits for the device here.
        return self._step, torch.tensor(float(sum(counts))) if counts else None

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The inputs as they are: the engine moves those columns to the device that it reads."""
        return inputs

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor | Any],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Take the inputs of one microbatch; the step's last one runs all of them in the pipeline.

        Args:
            model: the user's, whose parameters are those of this rank.
            inputs: the columns of the microbatch that this rank reads.
            num_items_in_batch: label tokens of the step; None where the loss is a mean.

        Returns:
            The loss of the step, a scalar, the same on every rank; zero before its last microbatch.

        Raises:
            DataError: a subclass gives other columns or shapes than the data has.
        """
        if self._step is None:
            self._refuse_by_hand("training_step", "train()")
            return super().training_step(model, {**inputs}, num_items_in_batch)
        prepared = self._prepare_inputs(inputs) if inputs else inputs  # a rank may read no column
        if not self._step.add(type(self), prepared):
            return self._for_the_loop(torch.zeros((), device=self.mesh.device))
        if not all(module.training for module in model.modules()):
            model.train()  # of each module, which takes longer than to look
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        self._losses = self._run_step(self._step, num_items_in_batch)
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            clear_device_cache()
        total = self._losses[0]
        for loss in self._losses[1:]:  # one by one, as the loop sums those of a single process
            total = total + loss
        return self._for_the_loop(total)

    def _for_the_loop(self, loss: torch.Tensor) -> torch.Tensor:
        """What the loop adds to its sum: for a loss that is not finite, the mean of those before.

        Such a step is found in `_get_grad_norm`. A subclass sees its loss as it is.
        """
        is_seen = overriding(self, "training_step") is not None
        if is_seen or not self.args.logging_nan_inf_filter:
            return loss
        mean = self._tr_loss / (1 + self.state.global_step - self._globalstep_last_logged)
        return torch.where(torch.isfinite(loss), loss, mean).as_subclass(StepLoss)

    def _refuse_by_hand(self, method: str, instead: str) -> None:
        """Refuse a step that a script makes by hand on a rank that has a part of the model.

        Raises:
            TrainingError: the job has several ranks.
        """
        if self.mesh.world_size > 1:
            raise TrainingError(
                f"trainer.{method} was called outside of {instead}, but each of the "
                f"{self.mesh.world_size} ranks has a part of the model, which they run together; "
                f"call {instead}."
            )

    def _run_step(
        self, step: StepInputs, num_items_in_batch: torch.Tensor | int | None
    ) -> torch.Tensor:
        """All microbatches' losses; gradients are final afterwards."""
        engine, counter = self.engine, self._counter
        assert engine is not None and counter is not None
        own = step.exchanged.own(self.mesh)
        left_over = self._left_over_gradients()
        engine.optimizer_params.clear_gradients()
        has_left_over = bool(left_over) or self._is_left_over
        delays = self.args.delay_optimizer_update
        engine.steps_early = not has_left_over and steps_beside_backward(self.args, delays=delays)
        extra = {} if num_items_in_batch is None else {TOKENS: torch.as_tensor(num_items_in_batch)}
        ran = _Ran(
            self.state.global_step,
            [counter.with_tokens(found).columns for _, found in own],
            [{**step.microbatches[number], **extra} for number, _ in own],
            self._loss_scale(step.exchanged.num_microbatches, num_items_in_batch is not None),
            1.0 if self.scaler is None else self.scaler.current(),
        )
        with self._saving_before_refusal():
            losses = engine.train_step(
                ran.step,
                ran.signatures,
                ran.batches,
                ran.scale,
                self._inner_optimizer().step if engine.updates_inside else None,
                ran.loss_scale,
                step.exchanged.columns,
            )
        engine.optimizer_params.add_gradients(left_over)
        self._ran = ran
        every = [replica for row in step.exchanged.metadata for replica in row]
        tokens = sum(metadata.get("inputs", 0) for metadata in every)
        self.throughput.add(tokens, step.exchanged.num_microbatches)
        numbers = [number for number, _ in own]
        everything = losses
        if numbers != list(range(len(step.microbatches))):
            everything = torch.zeros(len(step.microbatches), device=losses.device)
            everything[numbers] = losses
        engine.all_reduce(everything, "dp", "losses")
        self._replay(step)
        return everything

    def _replay(self, step: StepInputs) -> None:
        """Run a loss of the script's own for what it does besides, for each microbatch in order."""
        engine, counter = self.engine, self._counter
        assert engine is not None and counter is not None
        if not self._overrides_loss:
            return
        every = [
            (number, replica, counter.with_tokens(found).columns)
            for number, row in enumerate(step.exchanged.signatures)
            for replica, found in enumerate(row)
            if found.columns
        ]
        own = [n for n, (_, replica, _) in enumerate(every) if replica == self.mesh.dp_rank]
        engine.replay_losses([signature for *_, signature in every], own)

    def _left_over_gradients(self) -> dict[str, torch.Tensor]:
        """Gradients of microbatches before these that have not been stepped yet.

        An epoch of unknown length may end within a step. transformers then steps those gradients
        with the next step's, and logs their losses together.

        Raises:
            TrainingError: the schedule steps each microbatch's by itself.
        """
        assert self.engine is not None
        was_left_over, self._is_left_over = self._is_left_over, not self.accelerator.sync_gradients
        if self._is_left_over and self.engine.updates_inside:
            raise TrainingError(
                f"the epoch ends within step {self.state.global_step + 1}, and an asynchronous "
                "schedule cannot add its gradients to those of the next epoch: give a dataset "
                "whose epochs are multiples of a step, or that does not end."
            )
        return self.engine.optimizer_params.gradients() if was_left_over else {}

    def _loss_scale(self, num_microbatches: int, counted: bool) -> float:
        """The factor of a microbatch's loss, as transformers' loop and DDP together have it."""
        # An older transformers always leaves it to the model and the loss function.
        is_scaled: bool | None = getattr(self, "loss_is_scaled_for_ga", None)
        if is_scaled is None:
            # transformers leaves it to a loss function to scale what it sums over microbatches.
            is_scaled = counted or self.compute_loss_func is not None
        if not is_scaled:
            return 1.0 / num_microbatches
        is_total = counted and self.args.average_tokens_across_devices
        if self._overrides_loss and not self._divides_by_count:
            is_total = False  # each replica's is a mean of its own samples, as DDP averages them
        return 1.0 if is_total else 1.0 / self.mesh.dp

    def _loss_functions(self) -> tuple[object, ...]:
        """What the loss is computed by: a method of the script's own, functions given to it."""
        smoother = getattr(self, "label_smoother", None)
        return overriding(self, "compute_loss"), self.compute_loss_func, smoother

    def _refuse_other_loss(self) -> None:
        """Refuse a loss that has been replaced since the model was traced with it.

        Raises:
            TrainingError: it has.
        """
        if self.engine is None:
            return
        names = ("compute_loss", "compute_loss_func", "label_smoother")
        for name, traced, found in zip(names, self._traced_loss, self._loss_functions()):
            if found is not traced:
                before, after = (
                    "transformers' own" if one is None else describe(one) for one in (traced, found)
                )
                raise TrainingError(
                    f"{name} is {after} by now, but the model was traced with {before}; set it "
                    "before the first train() or evaluate(), make a new trainer for another loss, "
                    "or let the loss read a number (self.weight) that a callback changes."
                )

    @property
    def _overrides_loss(self) -> bool:
        return overriding(self, "compute_loss") is not None

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        assert self.engine is not None
        return self.engine.clip_gradients(self.args.max_grad_norm)

    def _get_grad_norm(
        self, model: nn.Module, grad_norm: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        assert self.engine is not None
        if self._step is not None and not self._step.is_complete and not self._is_alone:
            raise TrainingError(
                f"training_step of {type(self).__name__} has not called that of MerakTrainer, "
                "which runs the microbatches on all ranks; call super().training_step(…) in it."
            )
        norm = self.engine.gradient_norm() if grad_norm is None else grad_norm
        end = self._skipped.check.end(norm, self._losses)
        self._last_step.read()  # the step before, while the device runs this one
        is_masked = self.engine.reads_late and self.args.nan_policy != "rollback"
        if is_masked:
            self._rates = LearningRates(self.lr_scheduler, self._inner_optimizer())
        assert self._ran is not None
        locate = partial(self._locate_non_finite, self._ran)
        step = OpenStep(self.state.global_step + 1, end, locate, is_masked)
        is_left_out = self._last_step.take(self.engine, step)
        skipped = self._skipped
        if is_left_out and self.args.nan_policy == "rollback" and not skipped.check.is_overflow:
            self._saver.wait()
            self._rollbacks.roll_back(
                self.args, step.number, skipped.found, super()._load_optimizer_and_scheduler
            )
        # Without an update, the learning rate does not move either.
        self.optimizer._is_overflow = is_left_out
        return None if self.engine.updates_inside else norm

    def _skips(self, step: OpenStep, numbers: StepNumbers) -> bool:
        """Whether a step is left out, as it is not finite; equal on all ranks.

        Raises:
            TrainingError: it is not, and the job stops; what ran after it is not stepped.
        """
        skips = self._skipped.skips(self.args, step.number, numbers, step.locate)
        if self.args.logging_nan_inf_filter:
            self._total_loss_scalar = self._skipped.total(self._total_loss_scalar)
        if skips and step.is_masked:
            self._rates.restore()
        return skips

    def _locate_non_finite(self, ran: _Ran) -> str:
        """Where a step was first not finite, by running it once more; nothing if not wanted."""
        if not self.args.locate_nan:
            return ""
        assert self.engine is not None
        with phase(f"running step {ran.step + 1} again to find where it is not finite"):
            found = self.engine.locate_non_finite(
                ran.step, ran.signatures, ran.batches, ran.scale, ran.loss_scale
            )
        return f" ({found})"

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._rollbacks.add(checkpoint)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """As transformers does it, after a look at the replicas."""
        control = self.control
        looks = control.should_log, control.should_save, control.should_evaluate
        if any(looks) or control.should_training_stop or control.should_epoch_stop:
            self._last_step.read()
        every = self.args.check_replicas_steps
        if every and self.state.global_step % every == 0 and self.engine is not None:
            self.engine.check_replicas(f"after step {self.state.global_step}")
        if self._plan_watch is not None and self.engine is not None:
            self._plan_watch.compare(self.engine, self.state.global_step)
        super()._maybe_log_save_evaluate(*args, **kwargs)
        self.control = self.callback_handler.agree("on_log", self.control)
        self._change_layout()

    def _change_layout(self) -> None:
        """End the training in this layout behind a checkpoint, if another one is faster."""
        layout = None if self._plan_watch is None else self._plan_watch.layout
        step = self.state.global_step
        ends = self._is_finished() or self.control.should_training_stop
        if layout is None or ends or self._saved_step != step:
            return
        self._saver.wait()
        raise LayoutChange(layout, self._checkpoint_place())

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """transformers' own log, with NaN for the loss of steps of which none was finite."""
        if self.args.logging_nan_inf_filter:
            self._skipped.logged(logs)
        super().log(logs, start_time)

    def floating_point_ops(self, inputs: dict[str, torch.Tensor | Any]) -> int:
        """Floating point operations of the round's microbatches on all replicas."""
        return int(self._flops_per_token * self._round_tokens("inputs"))

    def _track_num_input_tokens(self, inputs: Mapping[str, Any]) -> None:
        kind = str(self.args.include_num_input_tokens_seen)
        if kind != "no":
            counted = "non_padding" if kind == "non_padding" else "inputs"
            self.state.num_input_tokens_seen += self._round_tokens(counted)

    def _round_tokens(self, kind: str) -> int:
        """Tokens of the microbatches that the last call of `training_step` was for."""
        assert self._step is not None
        return sum(metadata.get(kind, 0) for metadata in self._step.metadata)
