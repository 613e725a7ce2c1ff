"""Saving and resuming: transformers' checkpoints, with weights that many ranks hold.

A checkpoint folder holds what transformers writes (the model in its own format, the learning rate
scheduler, the trainer's state) and a folder of the ranks' parameters and optimizer states, which
any layout reads. Random draws and the order of the data are keyed by step and sample, so there is
no random state to keep.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import Trainer
from transformers.trainer import SCALER_NAME, SCHEDULER_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import TrainOutput

from merak.checkpoint.save_pretrained import save_pretrained
from merak.checkpoint.state import load_state, save_state
from merak.checkpoint.writing import writing_into
from merak.core.health.status import phase, waiting_for_all
from merak.core.mesh import Mesh
from merak.engine import Engine
from merak.engine.step.loss_scale import LossScale
from merak.trainer.before import check_output
from merak.trainer.resuming import RANKS_FOLDER, check_whole, checkpoint_to_resume, unreadable
from merak.trainer.unsupported import refuse_no_steps

if TYPE_CHECKING:
    from merak.arguments import MerakArguments


class Saving(Trainer):
    """The part of `MerakTrainer` that writes and reads folders."""

    args: MerakArguments
    mesh: Mesh
    engine: Engine | None
    scaler: LossScale | None
    # transformers types these as perhaps None; they are there when the methods below run.
    model: Any
    optimizer: Any
    lr_scheduler: Any
    compute_loss_func: Any

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *rest: Any, **kwargs: Any
    ) -> TrainOutput:
        """Train as `transformers.Trainer` does, after checking the checkpoint that it resumes from.

        Args:
            resume_from_checkpoint: a checkpoint's folder, or True for the last in `output_dir`.
            *rest: as in transformers.
            **kwargs: as in transformers.

        Raises:
            ArgumentsError: there is no step to train, or checkpoints cannot be saved.
            WeightsError: there is nothing to resume from, or it is not whole.
        """
        refuse_no_steps(self.args)
        check_output(self, self.mesh)
        found = checkpoint_to_resume(resume_from_checkpoint, str(self.args.output_dir))
        trained: TrainOutput = super().train(found, *rest, **kwargs)
        return trained

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save a folder that `from_pretrained` reads; all ranks call it, rank 0 writes.

        Args:
            output_dir: the folder; `args.output_dir` by default.
        """
        folder = output_dir if output_dir is not None else self.args.output_dir
        assert folder is not None
        if self.engine is None:
            with writing_into(folder):
                super().save_model(folder, _internal_call)
            return
        with self.engine.whole_model():
            held = self.engine.held()
            save_pretrained(self.model, held, self.engine.shards, self.mesh, folder)
        if self.args.should_save:
            with writing_into(folder):
                self._save_companions(folder)
            if self.args.push_to_hub and not _internal_call:
                self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_companions(self, folder: str) -> None:
        """Save the tokenizer and the arguments beside the model, as transformers does."""
        processing = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if processing is not None:
            processing.save_pretrained(folder)
        torch.save(self.args, os.path.join(folder, TRAINING_ARGS_NAME))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.engine is not None
        with self.engine.whole_model():
            save_state(
                Path(output_dir) / RANKS_FOLDER,
                self.model,
                self._inner_optimizer(),
                self.engine.held(),
                self.engine.shards,
                self.mesh,
                self.engine.optimizer_params.optimizer_tensors(),
            )
        if self.args.should_save:
            scheduler = self.lr_scheduler.state_dict()
            torch.save(scheduler, os.path.join(output_dir, SCHEDULER_NAME))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        with phase(f"saving the checkpoint of step {self.state.global_step}"):
            with writing_into(str(self.args.output_dir)):
                super()._save_checkpoint(model, trial)
            if self.mesh.world_size > 1:
                with waiting_for_all("the checkpoint to be written on"):
                    dist.barrier()  # no rank goes on, or ends, while rank 0 still writes

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Weights are loaded once the ranks have their segments, with the optimizer's state."""
        check_whole(Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        self._load_ranks(checkpoint, self._inner_optimizer())
        self.lr_scheduler.load_state_dict(_load(checkpoint, SCHEDULER_NAME))

    def _load_best_model(self) -> None:
        assert self.state.best_model_checkpoint is not None
        self._load_ranks(self.state.best_model_checkpoint, None)

    def _load_ranks(self, checkpoint: str, optimizer: torch.optim.Optimizer | None) -> None:
        assert self.engine is not None
        folder = Path(checkpoint) / RANKS_FOLDER
        engine = self.engine
        held, optimizer_tensors = engine.held(), engine.optimizer_params.optimizer_tensors()
        with engine.whole_model():
            load_state(
                folder, self.model, optimizer, held, engine.shards, self.mesh, optimizer_tensors
            )

    def _inner_optimizer(self) -> Any:
        """The optimizer itself, inside accelerate's wrapper."""
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def _save_scaler(self, output_dir: str) -> None:
        if self.scaler is not None and self.args.should_save:
            torch.save(self.scaler.state_dict(), os.path.join(output_dir, SCALER_NAME))

    def _load_scaler(self, checkpoint: str | None) -> None:
        if self.scaler is None or checkpoint is None:
            return
        if os.path.isfile(os.path.join(checkpoint, SCALER_NAME)):  # else it was without fp16
            self.scaler.load_state_dict(_load(checkpoint, SCALER_NAME))

    def _save_rng_state(self, output_dir: str) -> None:
        """Save nothing: random state is keyed by step and sample."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Load nothing: random state is keyed by step and sample."""


def _load(checkpoint: str, name: str) -> Any:
    """A small file of a checkpoint.

    Raises:
        WeightsError: it is damaged.
    """
    try:
        return torch.load(os.path.join(checkpoint, name), weights_only=True)
    except Exception as cause:  # whatever a damaged file may lead to
        raise unreadable(checkpoint, name, cause) from cause
