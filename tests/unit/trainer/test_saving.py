"""Checkpoints of a trainer in one process: what users' code finds there, and what may change."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainerCallback
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

import merak
from merak.checkpoint.saver import SENTINEL
from merak.core import mesh


@pytest.fixture(autouse=True)
def job() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    merak.init(device="cpu")
    yield
    mesh.reset()
    signal.signal(signal.SIGTERM, before)


class Model(nn.Module):
    """Its forward notes what it does in an attribute, as those of transformers do in configs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.problem: str | None = None
        self.temperature = 1.0

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.problem = "regression"
        return {"loss": nn.functional.mse_loss(self.linear(x), labels)}


class Anneal(TrainerCallback):
    """Changes an attribute of the model after every step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        rest["model"].temperature *= 0.5


class Extending(merak.MerakTrainer):
    """Adds a file to every checkpoint."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        folder = Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}"
        (folder / "extra.txt").write_text("here")


def trainer(
    folder: Path, kind: type[merak.MerakTrainer] = merak.MerakTrainer, **arguments: Any
) -> merak.MerakTrainer:
    torch.manual_seed(0)
    samples = [{"x": torch.ones(4) * i, "labels": torch.zeros(4)} for i in range(8)]
    args = merak.MerakArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        disable_tqdm=True,
        max_steps=3,
        save_steps=1,
        **arguments,
    )
    return kind(Model(), args, train_dataset=samples, eval_dataset=samples, callbacks=[Anneal()])


def test_what_a_run_changes_in_its_model_makes_it_no_other(tmp_path: Path) -> None:
    trainer(tmp_path).train()
    resumed = trainer(tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == 3


def test_a_file_that_a_subclass_adds_is_there(tmp_path: Path) -> None:
    trainer(tmp_path, Extending).train()
    for step in (1, 2, 3):
        assert (tmp_path / f"checkpoint-{step}" / "extra.txt").read_text() == "here"
        assert (tmp_path / f"checkpoint-{step}" / "manifest.json").is_file()


class Preempted(TrainerCallback):
    """Asks for a checkpoint as transformers does some seconds after a SIGTERM."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if state.global_step == 2:
            self.manager.is_checkpoint_requested = True

    def __init__(self, manager: Any) -> None:
        self.manager = manager


def test_a_checkpoint_just_in_time_takes_the_place_of_its_sentinel(tmp_path: Path) -> None:
    made = trainer(tmp_path, enable_jit_checkpoint=True, save_strategy="no")
    (own,) = (c for c in made.callback_handler.callbacks if isinstance(c, JITCheckpointCallback))
    made.add_callback(Preempted(own.jit_manager))
    made.train()
    (folder,) = tmp_path.glob("checkpoint-*")
    assert not (folder / SENTINEL).exists()
    resumed = trainer(tmp_path)
    resumed.train(resume_from_checkpoint=str(folder))
    assert resumed.state.global_step == 3


def test_the_last_checkpoint_is_there_when_the_training_ends(tmp_path: Path) -> None:
    """Where it is the best one, and the only one to keep, transformers looks at it at the end."""
    arguments = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"}
    run = trainer(tmp_path, save_total_limit=1, greater_is_better=False, **arguments)
    run.train()
    assert run.state.best_model_checkpoint == str(tmp_path / "checkpoint-3")
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-3", "_merak"}
