"""Which checkpoint is resumed from, and what one that is not whole is told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import TrainerState

from merak.core.errors import ArgumentsError, WeightsError
from merak.trainer.resuming import checkpoint_to_resume
from merak.trainer.saving import _load
from merak.trainer.unsupported import in_one_sentence, refuse_no_steps


def make(output_dir: Path, step: int) -> Path:
    """What the look at a checkpoint sees of a whole one."""
    folder = output_dir / f"checkpoint-{step}"
    (folder / "merak").mkdir(parents=True)
    (folder / "merak" / ".metadata").write_bytes(b"index")
    (folder / "scheduler.pt").write_bytes(b"numbers")
    TrainerState(global_step=step).save_to_json(str(folder / "trainer_state.json"))
    return folder


def test_nothing_to_resume(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(WeightsError, match=r"=True, but .* has no checkpoint-… folder; name"):
            checkpoint_to_resume(True, str(folder))
    with pytest.raises(WeightsError, match="resume_from_checkpoint='nowhere' is not a folder"):
        checkpoint_to_resume("nowhere", str(tmp_path))
    assert checkpoint_to_resume(None, str(tmp_path)) is None
    assert checkpoint_to_resume(False, str(tmp_path)) is None


@pytest.mark.parametrize("name", ["merak/.metadata", "scheduler.pt", "trainer_state.json"])
def test_a_file_that_is_missing_or_empty(name: str, tmp_path: Path) -> None:
    whole = make(tmp_path, 3)
    assert checkpoint_to_resume(whole, str(tmp_path)) == str(whole)
    (whole / name).write_bytes(b"")
    with pytest.raises(WeightsError, match=rf"is not a whole checkpoint \({re.escape(name)}"):
        checkpoint_to_resume(str(whole), str(tmp_path))
    (whole / name).unlink()
    with pytest.raises(WeightsError, match=rf"\({re.escape(name)}.* is missing\); resume from ano"):
        checkpoint_to_resume(str(whole), str(tmp_path))


def test_files_that_are_damaged(tmp_path: Path) -> None:
    whole = make(tmp_path, 3)
    with pytest.raises(WeightsError, match=r"\(scheduler\.pt cannot be read: .*\); resume from"):
        _load(str(whole), "scheduler.pt")
    torch.save({"last_epoch": 3}, whole / "scheduler.pt")
    assert _load(str(whole), "scheduler.pt") == {"last_epoch": 3}
    (whole / "trainer_state.json").write_text('{"global_step": ', encoding="utf-8")
    with pytest.raises(WeightsError, match=r"trainer_state\.json cannot be read: Expecting value"):
        checkpoint_to_resume(str(whole), str(tmp_path))


def test_a_folder_of_another_trainer(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    with pytest.raises(WeightsError, match="has no folder 'merak', so it is no checkpoint to res"):
        checkpoint_to_resume(str(tmp_path / "checkpoint-2"), str(tmp_path))


def test_the_last_whole_one_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    last = [make(tmp_path, step) for step in (9, 10)][-1]
    assert checkpoint_to_resume(True, str(tmp_path)) == str(last)
    assert not caplog.records
    (make(tmp_path, 11) / "trainer_state.json").unlink()
    (tmp_path / "checkpoint-best").mkdir()
    assert checkpoint_to_resume(True, str(tmp_path)) == str(tmp_path / "checkpoint-10")
    assert "checkpoint-11 is not a whole checkpoint" in caplog.text
    assert "Resuming from" in caplog.text


def test_no_steps() -> None:
    class Arguments:
        def __init__(self, max_steps: int, num_train_epochs: float) -> None:
            self.max_steps, self.num_train_epochs = max_steps, num_train_epochs

    for steps, epochs, said in ((0, 3.0, "max_steps=0 trains"), (-1, 0, "num_train_epochs=0 tr")):
        with pytest.raises(ArgumentsError, match=said):
            refuse_no_steps(Arguments(steps, epochs))  # type: ignore[arg-type]
    refuse_no_steps(Arguments(1, 0))  # type: ignore[arg-type]
    refuse_no_steps(Arguments(-1, 0.5))  # type: ignore[arg-type]


def test_only_what_transformers_refuses_is_put_in_a_sentence() -> None:
    refused = pytest.raises(
        ArgumentsError, match=r"^lr is refused: Invalid learning rate: -1\.0\.$"
    )
    with refused, in_one_sentence("lr is refused"):
        torch.optim.SGD([torch.zeros(1)], lr=-1.0)
    with pytest.raises(ValueError, match="of the user's own") as caught, in_one_sentence("it is"):
        raise ValueError("of the user's own")
    assert not isinstance(caught.value, ArgumentsError)
