"""The training loop of one process: a finished run, and SIGTERM."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

import merak
from merak.core import mesh
from merak.core.announce import logger
from merak.core.health import preemption


@pytest.fixture(autouse=True)
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(preemption, "_stop", preemption._Stop())
    monkeypatch.setattr(preemption, "_end_at", lambda limit_s: None)  # it would end all tests
    # torch's launcher leaves a handler in a process that has started ranks.
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    merak.init(device="cpu")
    yield
    if preemption._stop.supervisor is not None:
        # It would look at the process's own state next, and end the process with its tests.
        preemption._stop.supervisor.join()
    mesh.reset()
    signal.signal(signal.SIGTERM, before)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.linear(x), labels)}


class SigtermAfter(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)
            while not preemption._stop.is_requested:
                time.sleep(0.01)


def trainer(folder: Path, *callbacks: TrainerCallback, **arguments: Any) -> merak.MerakTrainer:
    torch.manual_seed(0)
    samples = [{"x": torch.ones(4) * i, "labels": torch.zeros(4)} for i in range(8)]
    args = merak.MerakArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        disable_tqdm=True,
        sigterm_limit_s=1e6,
        **arguments,
    )
    return merak.MerakTrainer(Model(), args, train_dataset=samples, callbacks=list(callbacks))


def test_a_finished_run_that_is_resumed_trains_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def train() -> merak.MerakTrainer:
        made = trainer(tmp_path, max_steps=3, save_steps=2)
        made.train(resume_from_checkpoint="auto")
        return made

    first = train()
    assert first.state.global_step == 3
    assert sorted(os.listdir(tmp_path)) == ["_merak", "checkpoint-2", "checkpoint-3"]
    monkeypatch.setattr(merak.MerakTrainer, "training_step", None)
    monkeypatch.setattr(logger, "propagate", True)
    second = train()
    assert second.state.global_step == 3
    assert "resumed after step 3 of 3: no step is left to train" in caplog.text
    for own, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert own.equal(other)


def test_sigterm_saves_before_the_next_step(tmp_path: Path) -> None:
    stopped = trainer(tmp_path, SigtermAfter(3), max_steps=8, save_steps=100)
    with pytest.raises(SystemExit) as ended:
        stopped.train()
    assert ended.value.code == preemption.TERMINATED
    assert sorted(os.listdir(tmp_path)) == ["_merak", "checkpoint-3"]


def test_sigterm_saves_nothing_where_nothing_is_saved(tmp_path: Path) -> None:
    stopped = trainer(tmp_path, SigtermAfter(3), max_steps=8, save_strategy="no")
    with pytest.raises(SystemExit):
        stopped.train()
    assert os.listdir(tmp_path) == ["_merak"]  # the record of the run alone
