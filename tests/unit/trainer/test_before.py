"""Space of checkpoints, before there is one."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from merak.arguments import folders
from merak.core.errors import ArgumentsError
from merak.core.mesh import Mesh
from merak.trainer.before import check_output, least_checkpoint_bytes
from merak.trainer.optimizer_like import similar_optimizer

ALONE = Mesh(1, 1, 1, 0, torch.device("cpu"), None)


def trainer(folder: Path, **arguments: Any) -> Trainer:
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10))  # 220 numbers
    model[0].requires_grad_(False)
    args = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[], **arguments)
    return Trainer(model=model, args=args)


def test_a_checkpoint_has_at_least_weights_and_optimizer_states(tmp_path: Path) -> None:
    weights = 110 * 4
    steps = 2 * 4  # AdamW counts them for both parameters
    assert least_checkpoint_bytes(trainer(tmp_path)) == 3 * weights + steps
    assert least_checkpoint_bytes(trainer(tmp_path, optim="sgd")) == weights
    assert least_checkpoint_bytes(trainer(tmp_path, save_only_model=True)) == weights


def test_an_optimizer_that_cannot_be_measured_counts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("looks at numbers")

    monkeypatch.setattr("merak.trainer.before.similar_optimizer", fail)
    assert least_checkpoint_bytes(trainer(tmp_path)) == 440
    assert caplog.text == ""


def test_a_disk_without_room_is_refused_and_a_small_one_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda _: SimpleNamespace(free=5000))
    with pytest.raises(ArgumentsError, match=r"has 5.0 kB free, .* at least 6.0 kB; make room, n"):
        folders.check_space(str(tmp_path), ALONE, 6000, 1)
    with caplog.at_level(logging.WARNING):
        folders.check_space(str(tmp_path), ALONE, 2000, 1)
        assert caplog.text == ""
        folders.check_space(str(tmp_path), ALONE, 2000, 2)
    assert "before the oldest of 2 is deleted: make room, or lower save_total_limit." in caplog.text


def test_last_weights_without_room_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda _: SimpleNamespace(free=800))
    in_parts = SimpleNamespace(rank=0, dp=1, world_size=2, device_mesh=None, hosts=())
    made: Any = trainer(tmp_path, save_strategy="no")
    made.args.save_last_weights, made.args.zero = True, 0
    check_output(made, in_parts)  # type: ignore[arg-type]
    assert "has 800 B free, but the last weights" in caplog.text  # 220 numbers of 4 bytes
    assert "or set save_last_weights=False" in caplog.text
    caplog.clear()
    made.args.save_last_weights = False
    check_output(made, in_parts)  # type: ignore[arg-type]
    check_output(made, ALONE)
    assert caplog.text == ""


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.NAdam])
def test_an_optimizer_like_a_given_one(cls: Any, tmp_path: Path) -> None:
    given = trainer(tmp_path)
    given.optimizer = cls(given.model.parameters(), betas=(0.8, 0.9))
    made = similar_optimizer(given, [nn.Parameter(torch.zeros(2))])
    assert type(made) is cls and made.param_groups[0]["betas"] == (0.8, 0.9)
