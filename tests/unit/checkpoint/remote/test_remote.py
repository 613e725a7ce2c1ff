"""Folders on remote storage: what is a checkpoint there, what is fetched, what is refused."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from merak.arguments.folders import folder_problems
from merak.checkpoint.files import inner_files, remove_partial
from merak.checkpoint.manifest import MANIFEST
from merak.checkpoint.remote.committing import remove_remote
from merak.checkpoint.remote.fetching import fetch, forget_tensors, local_files
from merak.checkpoint.remote.folder import RemoteFolder, name_of
from merak.checkpoint.saver import Contents, save_state
from merak.checkpoint.state import RankState
from merak.core.errors import SavingError, WeightsError
from merak.core.mesh import Mesh
from merak.trainer.checkpoints.resuming import checkpoint_to_resume, checkpoints_in, outdated
from tests import object_store
from tests.object_store import ObjectStore

ALONE = Mesh(1, 1, 1, 0, torch.device("cpu"), None)
RUN = "store://bucket/run"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "store"
    folder.mkdir()
    monkeypatch.setenv(object_store.ROOT, str(folder))
    return folder / "bucket" / "run"


def save(step: int, contents: Contents | None = None) -> str:
    url = f"{RUN}/checkpoint-{step}"
    state = RankState(nn.Linear(2, 2), None, ["weight", "bias"], {}, ALONE)
    save_state(url, state, contents)
    return url


def test_a_checkpoint_is_there_with_its_manifest(store: Path) -> None:
    for step in (2, 10, 4):
        save(step)
    (store / "checkpoint-10" / MANIFEST).unlink()
    (store / "checkpoint-x").mkdir()
    (store / "checkpoint-x" / MANIFEST).touch()
    assert checkpoints_in(RUN) == [f"{RUN}/checkpoint-4", f"{RUN}/checkpoint-2"]
    assert outdated(f"{RUN}/checkpoint-4", None, 1) == [f"{RUN}/checkpoint-2"]
    assert checkpoints_in("store://bucket/nothing") == []
    assert checkpoint_to_resume("auto", "unused", url="store://bucket/nothing") is None


def test_only_its_own_files_are_removed(store: Path) -> None:
    url = save(2)
    (store / "checkpoint-2" / "notes.txt").write_text("mine")
    remove_remote(RemoteFolder(url))
    assert os.listdir(store / "checkpoint-2") == ["notes.txt"]
    with pytest.raises(WeightsError, match="checkpoint-2 has files already and is no checkpoint"):
        save(2)
    save(2, Contents(owns_target=True))
    assert (store / "checkpoint-2" / "notes.txt").read_text() == "mine"


def test_a_save_takes_away_what_one_that_was_cut_off_has_left(store: Path) -> None:
    save(2)
    (store / "checkpoint-2" / MANIFEST).unlink()
    (store / "checkpoint-2" / "rank-00007.safetensors").write_bytes(b"of eight ranks")
    save(2)
    assert "rank-00007.safetensors" not in os.listdir(store / "checkpoint-2")


def test_a_save_that_fails_takes_the_manifest_before_it_changes_files(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(2)
    monkeypatch.setattr(ObjectStore, "fail_on", "rank-00000")
    with pytest.raises(SavingError, match=r"checkpoint-2 could not be written \(ConnectionError"):
        save(2)
    assert MANIFEST not in os.listdir(store / "checkpoint-2")


def test_files_of_tensors_are_fetched_when_they_are_read(store: Path, tmp_path: Path) -> None:
    url = save(2)
    folder = fetch(url, tmp_path / "here")
    assert {name for name in inner_files(folder) if not name_of(name).startswith(".")} == {MANIFEST}
    file = local_files(folder)("rank-00000.safetensors")
    assert file.read_bytes() == (store / "checkpoint-2" / "rank-00000.safetensors").read_bytes()
    forget_tensors(folder)
    assert not file.exists()
    path = store / "checkpoint-2" / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(WeightsError, match=f"{url} is damaged .rank-00000.safetensors has another"):
        local_files(folder)("rank-00000.safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(WeightsError, match=f"{url} is damaged .rank-00000.safetensors has "):
        fetch(url, tmp_path / "anew")


def test_what_a_job_that_was_killed_had_fetched_goes_with_the_next(
    store: Path, tmp_path: Path
) -> None:
    local_files(fetch(save(2), tmp_path / "out"))("rank-00000.safetensors")
    remove_partial(tmp_path / "out")
    assert os.listdir(tmp_path / "out") == []


def test_a_checkpoint_that_was_replaced_is_fetched_anew(store: Path, tmp_path: Path) -> None:
    url = save(2)
    local_files(fetch(url, tmp_path))("rank-00000.safetensors")
    save(2)  # other random weights
    path = local_files(fetch(url, tmp_path))("rank-00000.safetensors")
    assert path.read_bytes() == (store / "checkpoint-2" / path.name).read_bytes()


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"output_dir": "s3://bucket/run"}, "use checkpoint_url='s3://bucket/run'."),
        ({"checkpoint_url": "bucket/run"}, "checkpoint_url='bucket/run' is no URL; use such as"),
        ({"checkpoint_url": "none://run"}, "none://run cannot be reached: Protocol not known"),
        (
            {"checkpoint_url": RUN, "push_to_hub": True, "hub_strategy": "checkpoint"},
            "hub_strategy='checkpoint' pushes whole checkpoints, which checkpoint_url keeps",
        ),
    ],
)
def test_places_that_are_none(fields: dict[str, Any], sentence: str) -> None:
    given = {"checkpoint_url": None, "output_dir": ".", "push_to_hub": False, **fields}
    arguments: Any = SimpleNamespace(**given)
    (told,) = folder_problems(arguments)
    assert sentence in told
