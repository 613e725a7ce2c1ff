"""What is said of a full disk, whoever was writing."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from merak.checkpoint import saver, state, writing
from merak.checkpoint.storage import CheckpointWriter
from merak.checkpoint.writing import why_not_written, writing_into
from merak.core.errors import SavingError, TrainingError, WeightsError
from merak.core.mesh import Mesh

FULL = OSError(errno.ENOSPC, "No space left on device")
TORCH = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
RUST = Exception("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize(
    "error", [FULL, TORCH, RUST, CheckpointException("", {0: (FULL, None)})],  # type: ignore[dict-item]
    ids=["python", "torch", "rust", "distributed"],
)  # fmt: skip
def test_a_full_disk(error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_free_bytes", lambda folder: 200_000)
    with pytest.raises(SavingError) as caught, writing_into(tmp_path / "checkpoint-3"):
        raise error
    assert str(caught.value) == (
        f"{tmp_path / 'checkpoint-3'} could not be written: No space left on device (0.2 MB are "
        "free there now); make room, keep fewer checkpoints with save_total_limit, or name another "
        "output_dir."
    )
    assert isinstance(caught.value, WeightsError)
    assert isinstance(caught.value, TrainingError)  # a run that failed, not bad input


def test_other_reasons(tmp_path: Path) -> None:
    read_only = OSError(errno.EROFS, "Read-only file system")
    assert str(why_not_written(read_only, tmp_path)).startswith("Read-only file system; make it")
    cut_off = str(why_not_written(TORCH, tmp_path))  # where there is room by now
    assert cut_off.startswith("a file was cut off while it was written; make it")
    for other in (ValueError("no"), ConnectionResetError(errno.ECONNRESET, "reset")):
        assert why_not_written(other, tmp_path) is None
        with pytest.raises(type(other)), writing_into(tmp_path):
            raise other


def test_a_checkpoint_that_is_cut_off_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(writer: CheckpointWriter, *rest: object) -> None:
        (writer._folder / "half").write_bytes(b"x")
        raise CheckpointException("", {0: (TORCH, None)})  # type: ignore[dict-item]

    monkeypatch.setattr(saver, "_save_alone", fail)
    mesh = Mesh(1, 1, 1, 0, torch.device("cpu"), None)
    with pytest.raises(SavingError, match="merak could not be written: a file was cut off"):
        saver.save_state(
            tmp_path / "merak", state.RankState(nn.Linear(2, 2), None, ("weight", "bias"), {}, mesh)
        )
    assert not list(tmp_path.iterdir())
