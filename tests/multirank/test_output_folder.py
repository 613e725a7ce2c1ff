"""Output folders that ranks do not share, or cannot write, are found before anything is built."""

from __future__ import annotations

import logging
import os
import socket
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import merak
from merak.arguments import folders
from merak.core.errors import ArgumentsError, SavingError
from merak.core.files.folder_owner import Owner, Pace, owning
from merak.trainer.checkpoints import saving
from tests.multirank.ranks import RankPool
from tests.multirank.training import Setup, make_merak
from tests.tiers import slow


def starts(folder: str, case: str) -> str:
    """What a rank says of the output folder when it starts to train."""
    merak.init(dp=2, device="cpu")
    rank = dist.get_rank()
    setup = Setup(
        "gpt2",
        arguments={
            "max_steps": 1,
            "save_strategy": "no" if case == "not saved" else "steps",
            "output_dir": os.path.join(folder, str(rank) if case == "apart" else "run"),
        },
    )
    trainer = make_merak(setup, 2, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folders, "VISIBLE_S", 0.2)
        if case == "refused" and rank == 1:

            def refuse(*_: object, **__: object) -> None:
                raise PermissionError(13, "Permission denied")

            patch.setattr("tempfile.TemporaryFile", refuse)
        if case == "full":
            patch.setattr(folders.shutil, "disk_usage", lambda _: Free(2000))
        pace = Pace(touch_s=0.1, poll_s=0.1)
        patch.setattr(saving, "owning", partial(owning, pace=pace))
        is_owned = case == "owned" and rank == 0
        other = owning(Path(folder, "run"), Owner("of another"), pace)
        try:
            with other if is_owned else nullcontext():
                trainer.train()
        except (ArgumentsError, SavingError) as error:
            assert trainer.engine is None
            return str(error)
    assert not list(Path(folder).glob(f"*/{folders.PROBE}*"))
    return ""


class Free:
    """What `shutil.disk_usage` says."""

    def __init__(self, free: int) -> None:
        self.free = free


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("apart", "is not one folder for all ranks: rank 1 ({host}: {folder}/1) cannot see what "
         "rank 0 writes on {host}; name a folder on a file system that all hosts share for the "
         "checkpoints, or use save_strategy='no'."),
        slow("refused", "cannot be written by rank 1 (on {host}: [Errno 13] Permission denied); "
         "name another for the checkpoints, or use save_strategy='no'."),
        ("owned", "belongs to another job that is running (run id of another), whose checkpoints "
         "this one would remove; end that job, or name another output_dir."),
        slow("full", "has 2.0 kB free, but a checkpoint of this model takes at least 6"),
    ],
)  # fmt: skip
def test_ranks_cannot_save(case: str, sentence: str, pool: RankPool, tmp_path: Path) -> None:
    expected = sentence.format(host=socket.gethostname(), folder=tmp_path)
    for said in pool.run(starts, 2, str(tmp_path), case):
        assert expected in said


def warns(folder: str) -> tuple[list[str], list[str]]:
    """The warnings of a rank on a host of its own that does not save, or shares its folder."""
    mesh = merak.init(dp=2, device="cpu")
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    folders.logger.addHandler(handler)
    try:
        apart: Any = merak.core.mesh.Mesh(2, 1, 1, mesh.rank, mesh.device, mesh.device_mesh)
        folders.check_shared_folder(f"{folder}/{mesh.rank}", apart, saves=False)
        silent = list(heard)
        apart = merak.core.mesh.Mesh(2, 1, 1, mesh.rank, mesh.device, mesh.device_mesh, ("a", "b"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(folders, "VISIBLE_S", 0.2)
            folders.check_shared_folder(f"{folder}/{mesh.rank}", apart, saves=False)
        folders.check_shared_folder(f"{folder}/run", apart, saves=True)
    finally:
        folders.logger.removeHandler(handler)
    return silent, heard


def test_hosts_that_do_not_save_are_warned(pool: RankPool, tmp_path: Path) -> None:
    (silent, heard), (_, of_others) = pool.run(warns, 2, str(tmp_path))
    assert silent == of_others == []
    (line,) = heard
    assert "rank 1" in line
    assert line.endswith("that all hosts share if they are to read what is saved there.")
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]
