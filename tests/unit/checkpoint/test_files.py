"""Files of a checkpoint: memory that their checksums take, and what is in a checkpoint's place."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from merak.checkpoint import saver
from merak.checkpoint.files import commit, record_file, set_aside
from merak.checkpoint.manifest import MANIFEST
from merak.checkpoint.saver import Contents, save_state
from merak.checkpoint.state import RankState
from merak.core.errors import WeightsError
from merak.core.health.status import Status, status
from merak.core.health.timeouts import until
from merak.core.mesh import Mesh

ALONE = Mesh(1, 1, 1, 0, torch.device("cpu"), None)


def save(folder: Path, **contents: bool) -> None:
    save_state(folder, state_of_a_model(), Contents(**contents))  # type: ignore[arg-type]


def state_of_a_model() -> RankState:
    return RankState(nn.Linear(2, 2), None, ["weight", "bias"], {}, ALONE)


def test_a_checksum_takes_no_memory_that_a_thread_would_keep(tmp_path: Path) -> None:
    """Each save has a thread of its own, whose allocator keeps what was once allocated."""
    (tmp_path / "file").write_bytes(bytes(2**25))
    tracemalloc.start()
    try:
        record_file(tmp_path / "file")
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["folder", "file", "link", "dangling"])
def test_what_is_no_checkpoint_is_set_aside_or_refused(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "checkpoint-6"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine").touch()
    if kind == "folder":
        target.mkdir()
        (target / "mine").touch()
    elif kind == "file":
        target.touch()
    else:
        target.symlink_to("elsewhere" if kind == "link" else "nowhere")
    with pytest.raises(WeightsError, match="is there already and is no checkpoint"):
        save(target)
    save(target, owns_target=True)
    assert (target / MANIFEST).is_file() and not target.is_symlink()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"checkpoint-6", ".checkpoint-6.damaged", "elsewhere"}
    assert (tmp_path / "elsewhere" / "mine").is_file()


def test_a_link_to_a_checkpoint_is_replaced(tmp_path: Path) -> None:
    save(tmp_path / "kept")
    (tmp_path / "checkpoint-6").symlink_to("kept")
    (tmp_path / ".checkpoint-6.partial").symlink_to("kept")
    save(tmp_path / "checkpoint-6", owns_target=True)
    assert not (tmp_path / "checkpoint-6").is_symlink() and (tmp_path / "kept" / MANIFEST).is_file()
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-6", "kept"}


def test_what_was_set_aside_before_stays(tmp_path: Path) -> None:
    found = []
    for text in "abc":
        (tmp_path / "checkpoint-6").write_text(text)
        found.append(set_aside(tmp_path / "checkpoint-6"))
    names = [".checkpoint-6.damaged", ".checkpoint-6.damaged-2", ".checkpoint-6.damaged-3"]
    assert [path.name for path in found] == names
    assert [path.read_text() for path in found] == ["a", "b", "c"]


def test_a_slow_commit_is_no_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks wait longer for a rank that does something, and name it."""
    seen: list[Status] = []

    def slow(*committed: Any) -> None:
        until(lambda: status().phase.startswith("committing"), 60.0)
        seen.append(status())
        commit(*committed)

    monkeypatch.setattr(saver, "commit", slow)
    background = saver.CheckpointSaver(ALONE)
    background.save(tmp_path / "checkpoint-1", state_of_a_model())
    background.wait()
    background.close()
    assert [(own.phase, own.wait) for own in seen] == [("committing checkpoint-1", None)]
