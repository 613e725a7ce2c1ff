"""Checkpoints of a trainer in one process: what users' code finds there, and what may change."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from functools import partial
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
from merak.core.errors import SavingError
from merak.core.files.folder_owner import FILE, Owner, Pace, owning
from merak.trainer.checkpoints import saving


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


class Looking(TrainerCallback):
    """Looks at the file of the folder's owner after each step."""

    def __init__(self) -> None:
        self.found: list[Owner] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        text = (Path(args.output_dir) / FILE).read_text()
        self.found.append(Owner(**json.loads(text)))


def test_a_job_owns_its_folder_while_it_trains(tmp_path: Path) -> None:
    looking, run = Looking(), trainer(tmp_path)
    run.add_callback(looking)
    run.train()
    assert looking.found == [Owner("", socket.gethostname(), os.getpid())] * 3
    assert not (tmp_path / FILE).exists()


def test_a_folder_of_a_job_that_runs_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial_of_it = tmp_path / ".checkpoint-2.partial"
    monkeypatch.setattr(
        saving, "owning", partial(owning, pace=Pace(touch_s=0.1, alive_s=600.0, poll_s=0.1))
    )
    with owning(tmp_path, Owner("other"), Pace(touch_s=0.1)):
        partial_of_it.mkdir()
        with pytest.raises(SavingError, match="belongs to another job that is running"):
            trainer(tmp_path).train()
        assert partial_of_it.is_dir()
        trainer(tmp_path, save_strategy="no").train()  # which writes no checkpoint
        assert partial_of_it.is_dir()
    trainer(tmp_path).train()
    assert not partial_of_it.exists() and (tmp_path / "checkpoint-3").is_dir()


class Overtaken(TrainerCallback):
    """Another job takes the folder after the first step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if state.global_step == 1:
            (Path(args.output_dir) / FILE).write_text('{"run": "other"}')


def test_nothing_is_saved_in_a_folder_that_another_job_has_taken(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.add_callback(Overtaken())
    with pytest.raises(SavingError, match=r"was taken by another job \(run id other\) while"):
        run.train()
    assert (tmp_path / "checkpoint-1").is_dir() and not (tmp_path / "checkpoint-2").exists()
    assert (tmp_path / FILE).exists()


@pytest.mark.parametrize("is_file", [True, False])
def test_what_is_in_the_place_of_a_checkpoint_is_set_aside(tmp_path: Path, is_file: bool) -> None:
    if is_file:
        (tmp_path / "checkpoint-2").write_text("mine")
    else:
        (tmp_path / "checkpoint-2" / "mine").mkdir(parents=True)
    trainer(tmp_path).train()
    assert (tmp_path / "checkpoint-2" / "manifest.json").is_file()
    assert (tmp_path / ".checkpoint-2.damaged").exists()


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
