"""Saving and resuming: transformers' checkpoints, with weights that many ranks hold.

A checkpoint is one folder, written aside in the background and renamed when it is whole: the model
as `from_pretrained` reads it, the trainer's state, and the ranks' shards, which any layout reads.
Random draws and the order of the data are keyed by step and sample, so there is no random state to
keep.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState, TrainerCallback
from transformers.trainer_utils import (
    SaveStrategy,
    TrainOutput,
)

from merak.arguments import refuse_different_arguments
from merak.checkpoint.description import describe_model
from merak.checkpoint.files import remove_partial
from merak.checkpoint.formats.of_trainer import Order
from merak.checkpoint.model_files import ModelFiles, plan_model_files
from merak.checkpoint.remote.fetching import (
    forget_tensors,
    is_fetched,
    opened,
    remove_fetched,
)
from merak.checkpoint.remote.folder import RemoteFolder, name_of
from merak.checkpoint.saved import open_checkpoint
from merak.checkpoint.saver import Contents
from merak.checkpoint.state import check_model, load_state
from merak.core.announce import announce
from merak.core.errors import ArgumentsError, RefusedBatchError, SavingError
from merak.core.files.folder_owner import owning, this_job
from merak.core.health.roll_call import call_the_roll
from merak.core.rank0 import decide_on_rank0, warn_on_rank0
from merak.engine.rank_state import rank_state
from merak.engine.step.loss_scale import LossScale
from merak.graph.weights.holders import find_holders
from merak.trainer.before import check_output, leaves_last_weights, saves_checkpoints
from merak.trainer.checkpoints.model_saving import ModelSaving, degrees
from merak.trainer.checkpoints.resuming import (
    AUTO,
    checkpoint_place,
    checkpoint_to_resume,
    is_there,
    outdated,
    remove_checkpoint,
)
from merak.trainer.subclass.methods import overriding
from merak.trainer.unsupported import refuse_no_steps

logger = logging.getLogger(__name__)


class Saving(ModelSaving):
    """The part of `MerakTrainer` that writes and reads folders."""

    scaler: LossScale | None
    # transformers types these as perhaps None; they are there when the methods below run.
    optimizer: Any
    lr_scheduler: Any
    compute_loss_func: Any
    _planned_files: ModelFiles | None = None
    # Step of the newest checkpoint, also of the one that was resumed from.
    _saved_step: int
    _order: Order | None = None  # of the parameters in the optimizer's groups

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *rest: Any, **kwargs: Any
    ) -> TrainOutput:
        """Train as `transformers.Trainer` does, after checking the checkpoint that it resumes from.

        Args:
            resume_from_checkpoint: a checkpoint's folder or URL; True for the newest valid one in
                `checkpoint_url` or `output_dir`; "auto" for that one, or for a new training where
                there is none. By default "auto" if the arguments say so.
            *rest: as in transformers.
            **kwargs: as in transformers.

        Raises:
            ArgumentsError: there is no step to train, or checkpoints cannot be saved.
            WeightsError: there is nothing to resume from, or it is damaged.
            SavingError: a checkpoint could not be written, or another job that runs saves its
                checkpoints in the same `output_dir`.
            TrainingError: other ranks do not train.
        """
        call_the_roll("trainer.train")
        request: object = resume_from_checkpoint
        if request is None and self.args.resume_from_checkpoint == AUTO:
            request = AUTO
        self._compare_ranks(resume_from_checkpoint=request)
        refuse_no_steps(self.args)
        check_output(self, self.mesh)
        with self._owning():
            return self._train(request, *rest, **kwargs)

    @contextmanager
    def _owning(self) -> Iterator[None]:
        """Own the output folder where checkpoints or weights are saved; a collective."""
        folder, saves = Path(str(self.args.output_dir)), saves_checkpoints(self)
        with ExitStack() as stack:

            def own() -> None:
                try:
                    self._check_owner = stack.enter_context(owning(folder, this_job()))
                except SavingError as error:
                    if saves or not isinstance(error.__cause__, OSError):
                        raise
                else:  # a folder that cannot be written is no error where there are no checkpoints
                    remove_partial(folder)

            if saves or leaves_last_weights(self, self.mesh):
                decide_on_rank0(self.mesh, "the owner of output_dir", own)
            yield

    def _train(self, request: object, *rest: Any, **kwargs: Any) -> TrainOutput:
        output_dir = str(self.args.output_dir)
        found = checkpoint_to_resume(
            request,
            output_dir,
            url=self.args.checkpoint_url,
            allow_pickled=self.args.allow_pickled_checkpoint,
        )
        try:
            trained: TrainOutput = super().train(found, *rest, **kwargs)
        except BaseException:
            self._saver.abandon()
            raise
        finally:
            if found is not None:
                remove_fetched(Path(found))
        self._saver.wait()
        return trained

    def _checkpoint_place(self, trial: Any = None) -> str:
        """Folder or URL of the checkpoint of the step that is done."""
        return checkpoint_place(self._run_place(trial), self.state.global_step)

    def _run_place(self, trial: Any = None) -> str:
        """Folder or URL of the run's checkpoints; a trial of a search has one inside of it."""
        folder, url = str(self._get_output_dir(trial=trial)), self.args.checkpoint_url
        if url is None:
            return folder
        inner = Path(folder).relative_to(str(self.args.output_dir)).as_posix()
        return url if inner == "." else RemoteFolder(url).child(inner).url

    @contextmanager
    def _saving_before_refusal(self) -> Iterator[None]:
        """Context of batches that all ranks refuse together, behind a save of what is trained."""
        try:
            yield
        except RefusedBatchError:
            self._save_before_refusal()
            raise

    def _save_before_refusal(self) -> None:
        step, place = self.state.global_step, self._checkpoint_place()
        if not step or self._saved_step == step:
            self._saver.wait()
            return
        if saves_checkpoints(self):
            self._save_checkpoint(self.model, None)
            self._saver.wait()
            announce("the batch behind step %d is refused; %s has what is trained", step, place)
        else:
            self._leave_last_weights(also_whole=True)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if self.engine is None:
            raise ArgumentsError("there is nothing to save before training; call train() first.")
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        place, url = self._checkpoint_place(trial), self.args.checkpoint_url
        folder = Path(self._get_output_dir(trial=trial)) / name_of(place)
        self._note_best(self._run_place(trial), place)
        scaler = {} if self.scaler is None else {"loss_scale": self.scaler.state_dict()}
        contents = Contents(
            values={
                "scheduler": self.lr_scheduler.state_dict(),
                "step_samples": self._step_samples,
                **scaler,
            },
            layout=degrees(self.mesh) | {"schedule": self.args.schedule, "zero": self.args.zero},
            model_files=self._plan_files(),
            write_files=self._write_files,
            committed=partial(self._remove_old, place, self.state.best_model_checkpoint),
            owns_target=True,
            url=None if url is None else place,
        )
        self._saver.wait()
        decide_on_rank0(self.mesh, "the owner of output_dir", self._check_owner)
        with self.engine.whole_model():
            optimizer = None if self.args.save_only_model else self._inner_optimizer()
            self._saver.save(folder, rank_state(self.engine, self.model, optimizer), contents)
        if url is None:
            self.engine.last_weights.note(folder)
        else:
            self.engine.last_weights.forget(f"they are at {place}")
        if self.args.push_to_hub or self._needs_it_on_save:
            self._saver.wait()
            if url is None:
                self._offer(folder)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(folder))

    def _finalize_training(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """End the training as transformers does, which looks at the checkpoints in the folder."""
        self._saver.wait()
        return cast("TrainOutput", super()._finalize_training(*args, **kwargs))  # type: ignore[no-untyped-call]

    @property
    def _step_samples(self) -> int:
        """Samples of one step of the whole job."""
        each: int = self._train_batch_size * self.args.gradient_accumulation_steps
        return each * self.mesh.dp

    def _plan_files(self) -> ModelFiles | None:
        """Files of the model in every checkpoint, and the ranks that write them; collective."""
        engine, planned = self.engine, self._planned_files
        assert engine is not None
        if planned is None or planned.model is not self.model:  # `model_init` makes new ones
            with engine.whole_model():
                held = find_holders(self.model, engine.held(), engine.shards, self.mesh)
                planned = plan_model_files(self.model, held, self.mesh)
            self._planned_files = planned
        return planned

    def _compare_ranks(self, **further: object) -> None:
        """Refuse arguments and a loss that differ by rank; a collective of all ranks.

        Args:
            **further: what else all ranks must have alike.
        """
        loss = overriding(self, "compute_loss") or self.compute_loss_func
        refuse_different_arguments(self.args, compute_loss=loss, **further)

    @cached_property
    def _needs_it_on_save(self) -> bool:
        """Whether code of the user may look for the checkpoint in the folder once it is saved."""
        own = [] if overriding(self, "_save_checkpoint") is None else [type(self).__name__]
        own += [
            type(callback).__name__
            for callback in self.callback_handler.callbacks
            if overriding(callback, "on_save") is not None
            or (
                type(callback).on_save is not TrainerCallback.on_save
                and not type(callback).__module__.startswith("merak.")
            )
        ]
        if own and self.args.async_save:
            announce(
                "checkpoints are written before training goes on, for what %s does then", own[0]
            )
        return bool(own)

    def _note_best(self, run: str, place: str) -> None:
        """Note the folder or URL of the best checkpoint so far, as transformers does."""
        steps = (SaveStrategy.STEPS, SaveStrategy.EPOCH, SaveStrategy.BEST)
        if self.args.save_strategy in steps and self.state.best_global_step:
            best = checkpoint_place(run, self.state.best_global_step)
            if best == place or self._saver.is_saving(best) or is_there(best):
                self.state.best_model_checkpoint = best

    def _write_files(self, folder: Path) -> None:
        """Write what a checkpoint holds beside weights and the ranks' shards, on rank 0."""
        self._save_companions(str(folder))
        for one in [*self.callback_handler.callbacks, self.control]:
            if not isinstance(one, ExportableState):
                continue
            name = type(one).__name__
            known: dict[str, Any] = cast("dict[str, Any]", self.state.stateful_callbacks)
            if isinstance(known.get(name), list):
                known[name].append(one.state())
            else:
                known[name] = one.state()
        self.state.save_to_json(str(folder / TRAINER_STATE_NAME))

    def _remove_old(self, newest: str, best: str | None) -> None:
        """Keep as many checkpoints as asked for, the newest and the best among them."""
        for place in outdated(newest, best, self.args.save_total_limit):
            remove_checkpoint(place)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Weights are loaded once the ranks have their segments, with the optimizer's state."""
        allowed = self.args.allow_pickled_checkpoint
        saved = open_checkpoint(Path(resume_from_checkpoint), allowed)
        known = None if self.engine is None else self.engine.description
        check_model(saved, known or describe_model(self.model))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        optimizer = self._inner_optimizer()
        values = self._load_ranks(checkpoint, optimizer)
        self.lr_scheduler.load_state_dict(values["scheduler"])
        samples = values.get("step_samples", self._step_samples)  # none in earlier checkpoints
        if samples != self._step_samples:
            warn_on_rank0(
                logger,
                "%s is of a job with %d samples a step, and this one has %d, so it goes on at "
                "another place of the data; set global_batch=%d to keep them on any number of "
                "ranks.", checkpoint, samples, self._step_samples, samples,
            )  # fmt: skip
        for number, group in enumerate(optimizer.param_groups):
            if not group["params"]:  # of which no parameter of this rank tells the learning rate
                group["lr"] = self.lr_scheduler.get_last_lr()[number]
        if self.scaler is not None and "loss_scale" in values:  # else it was without fp16
            self.scaler.load_state_dict(values["loss_scale"])

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        assert best is not None
        self._saver.wait()
        with opened(best) as folder:
            self._load_ranks(str(folder), None)

    def _load_ranks(
        self, checkpoint: str, optimizer: torch.optim.Optimizer | None
    ) -> Mapping[str, Any]:
        """Load parameters, and the optimizer if one is given; returns the small values."""
        assert self.engine is not None
        with self.engine.whole_model():
            state = rank_state(self.engine, self.model, optimizer)
            state = replace(state, order=self._order)
            values = load_state(Path(checkpoint), state, self.args.allow_pickled_checkpoint)
        if is_fetched(Path(checkpoint)):
            forget_tensors(Path(checkpoint))
        else:
            self.engine.last_weights.note(Path(checkpoint))
        return values

    def _inner_optimizer(self) -> Any:
        """The optimizer itself, inside accelerate's wrapper."""
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Load nothing: the loss scale is loaded with the optimizer."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Load nothing: random state is keyed by step and sample."""
