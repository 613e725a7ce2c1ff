"""Which checkpoint is resumed from, and what is said of one that is damaged."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from merak.checkpoint.saver import save_state
from merak.checkpoint.state import RankState
from merak.core.errors import ArgumentsError, WeightsError
from merak.core.mesh import Mesh
from merak.trainer.checkpoints.resuming import checkpoint_to_resume, outdated
from merak.trainer.unsupported import in_one_sentence, refuse_no_steps

ALONE = Mesh(1, 1, 1, 0, torch.device("cpu"), None)


def make(output_dir: Path, step: int) -> Path:
    folder = output_dir / f"checkpoint-{step}"
    state = RankState(nn.Linear(2, 2), None, ["weight", "bias"], {}, ALONE)
    save_state(folder, state)
    return folder


def test_nothing_to_resume(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(WeightsError, match=r"=True, but it has no checkpoint-… folder; name"):
            checkpoint_to_resume(True, str(folder))
    with pytest.raises(WeightsError, match="resume_from_checkpoint='nowhere' is not a folder"):
        checkpoint_to_resume("nowhere", str(tmp_path))
    assert checkpoint_to_resume(None, str(tmp_path)) is None
    assert checkpoint_to_resume(False, str(tmp_path)) is None


@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.safetensors"])
def test_a_file_that_is_missing_or_cut_off(name: str, tmp_path: Path) -> None:
    whole = make(tmp_path, 3)
    assert checkpoint_to_resume(whole, str(tmp_path)) == str(whole)
    content = (whole / name).read_bytes()
    (whole / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(WeightsError, match=rf"checkpoint-3 .*\({name}.*\); resume from another"):
        checkpoint_to_resume(str(whole), str(tmp_path))
    (whole / name).unlink()
    with pytest.raises(WeightsError, match=rf"\({name}.* is missing\); resume from another"):
        checkpoint_to_resume(str(whole), str(tmp_path))


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    whole = make(tmp_path, 3)
    for path in whole.iterdir():
        content = path.read_bytes()
        for place in range(len(content)):
            flipped = bytearray(content)
            flipped[place] ^= 1 << place % 8
            path.write_bytes(flipped)
            with pytest.raises(WeightsError, match="checkpoint-3"):
                checkpoint_to_resume(whole, str(tmp_path))
        path.write_bytes(content)
    assert checkpoint_to_resume(whole, str(tmp_path)) == str(whole)


def test_a_folder_of_another_trainer(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    with pytest.raises(WeightsError, match=r"no valid checkpoint \(manifest.json, which is writ"):
        checkpoint_to_resume(str(tmp_path / "checkpoint-2"), str(tmp_path))


def test_the_newest_valid_one_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert checkpoint_to_resume("auto", str(tmp_path)) is None
    last = [make(tmp_path, step) for step in (9, 10)][-1]
    for request in (True, "auto"):
        assert checkpoint_to_resume(request, str(tmp_path)) == str(last)
    assert not caplog.records
    file = make(tmp_path, 11) / "rank-00000.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    (tmp_path / "checkpoint-best").mkdir()
    assert checkpoint_to_resume(True, str(tmp_path)) == str(tmp_path / "checkpoint-10")
    assert "checkpoint-11 is damaged (rank-00000.safetensors has another check" in caplog.text
    assert "Passed over for" in caplog.text


def test_where_none_is_valid_nothing_begins_anew(tmp_path: Path) -> None:
    (make(tmp_path, 4) / "manifest.json").unlink()
    with pytest.raises(WeightsError, match="checkpoint-4 holds no valid checkpoint"):
        checkpoint_to_resume("auto", str(tmp_path))


def test_one_without_a_manifest_is_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (3, 6, 9):
        make(tmp_path, step)
    for step in (6, 9):
        (tmp_path / f"checkpoint-{step}" / "manifest.json").unlink()
    found = checkpoint_to_resume("auto", str(tmp_path), reads_all=False)  # a check before a job
    assert found == str(tmp_path / "checkpoint-3") and (tmp_path / "checkpoint-9").exists()
    assert checkpoint_to_resume("auto", str(tmp_path)) == found
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"checkpoint-3", ".checkpoint-6.damaged", ".checkpoint-9.damaged"}
    assert f"It is {tmp_path / '.checkpoint-9.damaged'} now." in caplog.text


def test_a_pipe_in_the_place_of_a_manifest_is_not_waited_for(tmp_path: Path) -> None:
    make(tmp_path, 3)
    (make(tmp_path, 6) / "manifest.json").unlink()
    os.mkfifo(tmp_path / "checkpoint-6" / "manifest.json")
    assert checkpoint_to_resume("auto", str(tmp_path)) == str(tmp_path / "checkpoint-3")
    make(tmp_path, 6)  # whose step another checkpoint of the run replaces
    assert checkpoint_to_resume("auto", str(tmp_path)) == str(tmp_path / "checkpoint-6")


@pytest.mark.parametrize("digits", ["²", "٣", "३", "6²", "+6", " 6", "6_0", "", "-1", "1e3", "½"])
def test_digits_that_no_trainer_writes(tmp_path: Path, digits: str) -> None:
    make(tmp_path, 3)
    (tmp_path / f"checkpoint-{digits}").mkdir()
    assert checkpoint_to_resume("auto", str(tmp_path)) == str(tmp_path / "checkpoint-3")
    assert outdated(str(tmp_path / "checkpoint-3"), None, 1) == []


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


def test_what_a_run_removes(tmp_path: Path) -> None:
    names = ["checkpoint-2-mine", *(f"checkpoint-{step}" for step in (1, 2, 3, 4, 100))]
    for name in names:
        (tmp_path / name).mkdir()

    def removed(best: str | None, limit: int | None) -> list[str]:
        found = None if best is None else str(tmp_path / best)
        return [Path(one).name for one in outdated(str(tmp_path / "checkpoint-4"), found, limit)]

    assert removed(None, 1) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert removed("checkpoint-2", 1) == ["checkpoint-1", "checkpoint-3"]
    assert removed("checkpoint-4", 2) == ["checkpoint-1", "checkpoint-2"]
    assert removed("checkpoint-100", 3) == ["checkpoint-1"]
    for unlimited in (None, 0, -1, 9):
        assert not removed(None, unlimited)
