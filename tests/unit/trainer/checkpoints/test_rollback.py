"""Rollbacks: to the newest valid checkpoint of the run itself, and not for ever."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from merak.core.errors import TrainingError, WeightsError
from merak.trainer.checkpoints import rollback
from merak.trainer.checkpoints.resuming import checkpoint_place
from merak.trainer.checkpoints.rollback import Rollbacks


def arguments(most: int = 2) -> Any:
    return SimpleNamespace(
        max_rollbacks=most, save_steps=500, allow_pickled_checkpoint=False, output_dir="runs"
    )


@pytest.fixture
def valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of checkpoints 10, 20 and 30, of which the last is damaged."""
    for step in (10, 20, 30):
        Path(checkpoint_place(str(tmp_path), step)).mkdir()

    def check(checkpoint: str, output_dir: str, *, allow_pickled: bool) -> str:
        if checkpoint.endswith("30"):
            raise WeightsError("checkpoint-30 is damaged.")
        return checkpoint

    monkeypatch.setattr(rollback, "checkpoint_to_resume", check)
    return tmp_path


def test_the_newest_valid_checkpoint_is_loaded(
    valid: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rollbacks, loaded = Rollbacks(), []
    for step in (10, 20, 30):
        rollbacks.add(checkpoint_place(str(valid), step))
    rollbacks.roll_back(arguments(), 33, "loss nan and gradient norm nan", loaded.append)
    shutil.rmtree(loaded[0])  # by save_total_limit
    rollbacks.roll_back(arguments(), 34, "loss nan and gradient norm nan", loaded.append)
    assert [Path(one).name for one in loaded] == ["checkpoint-20", "checkpoint-10"]
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "checkpoint-30 is damaged."
    assert said[1] == (
        f"step 33 has loss nan and gradient norm nan; rolled back to {valid}/checkpoint-20 (1 of "
        "at most 2 times), and going on with the data after the step."
    )
    with pytest.raises(TrainingError) as caught:
        rollbacks.roll_back(arguments(), 35, "loss inf and gradient norm inf", loaded.append)
    assert str(caught.value) == (
        "step 35 has loss inf and gradient norm inf, after 2 rollbacks; lower the learning rate, "
        "look at the data, or raise max_rollbacks=2."
    )


def test_checkpoints_of_an_earlier_run_are_not_rolled_back_to(valid: Path) -> None:
    rollbacks = Rollbacks()
    rollbacks.add(checkpoint_place(str(valid), 10))
    rollbacks.start()
    with pytest.raises(TrainingError, match="this run has no checkpoint yet to roll back to; save"):
        rollbacks.roll_back(arguments(), 3, "loss nan and gradient norm nan", lambda _: None)
