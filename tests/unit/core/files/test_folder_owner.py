"""The owner of a folder: who may write there, with a clock that the tests turn."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from merak.core.errors import SavingError
from merak.core.files.folder_owner import FILE, Owner, Pace, owning, this_job

FIRST, SECOND = Owner("first"), Owner("", "elsewhere", 7)


def left_by(folder: Path, owner: Owner, seconds_ago: float) -> Path:
    """The file of a job that was killed some seconds ago."""
    with owning(folder, owner):
        content = (folder / FILE).read_text()
    (folder / FILE).write_text(content)
    touched = time.time() - seconds_ago
    os.utime(folder / FILE, (touched, touched))
    return folder / FILE


class Clock:
    """Waits that take no time: the file grows older instead, unless its owner touches it."""

    def __init__(self, path: Path, touches_after_s: float | None = None) -> None:
        self.path, self.touches_after_s, self.waited_s = path, touches_after_s, 0.0

    def wait(self, seconds: float) -> None:
        self.waited_s += seconds
        found = self.path.stat().st_mtime - seconds
        if self.touches_after_s is not None and self.waited_s >= self.touches_after_s:
            found = time.time()
        os.utime(self.path, (found, found))


def test_names_of_jobs() -> None:
    here = socket.gethostname()
    assert this_job({"TORCHELASTIC_RUN_ID": "job 7", "RANK": "0"}) == Owner("job 7")
    for found in ({"TORCHELASTIC_RUN_ID": "none", "RANK": "0"}, {"RANK": "0"}):
        assert this_job(found) == Owner("", here, os.getppid())
    assert this_job({}) == Owner("", here, os.getpid())


def test_a_folder_is_owned_until_the_job_ends(tmp_path: Path) -> None:
    with owning(tmp_path, FIRST) as check:
        assert json.loads((tmp_path / FILE).read_text())["run"] == "first"
        check()
    assert not list(tmp_path.iterdir())
    with pytest.raises(KeyError), owning(tmp_path, SECOND):
        raise KeyError
    assert not list(tmp_path.iterdir())


def test_restarts_of_a_job_do_not_wait(tmp_path: Path) -> None:
    clock = Clock(left_by(tmp_path, FIRST, 1.0))
    with owning(tmp_path, FIRST, wait=clock.wait):
        assert not clock.waited_s


def test_the_end_of_a_dead_owner_is_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock(left_by(tmp_path, FIRST, 20.0))
    with owning(tmp_path, SECOND, wait=clock.wait):
        assert 40.0 <= clock.waited_s <= 45.0
        assert json.loads((tmp_path / FILE).read_text())["host"] == "elsewhere"
    assert "was used by another job (run id first); waiting up to 60 s" in caplog.text
    long_dead = Clock(left_by(tmp_path, FIRST, 1000.0))
    with owning(tmp_path, SECOND, wait=long_dead.wait):
        assert long_dead.waited_s <= 1.0


def test_an_owner_that_lives_is_left_alone(tmp_path: Path) -> None:
    path = left_by(tmp_path, SECOND, 5.0)
    clock, content = Clock(path, touches_after_s=7.0), path.read_text()
    with pytest.raises(SavingError) as caught, owning(tmp_path, FIRST, wait=clock.wait):
        pass
    assert str(caught.value) == (
        f"output_dir={str(tmp_path)!r} belongs to another job that is running (process 7 on "
        "elsewhere), whose checkpoints this one would remove; end that job, or name another "
        "output_dir."
    )
    assert clock.waited_s == 7.0 and path.read_text() == content


def test_of_two_at_once_one_has_it(tmp_path: Path) -> None:
    """Another job takes the folder of a dead one while this one does."""
    path = left_by(tmp_path, FIRST, 1000.0)

    def overtaken(seconds: float) -> None:
        path.write_text(json.dumps({"run": "third", "host": "", "pid": 0}))

    refused = pytest.raises(SavingError, match=r"another job that is running \(run id third\)")
    with refused, owning(tmp_path, SECOND, wait=touching(path, overtaken)):
        pass


def touching(path: Path, first: Callable[[float], None]) -> Callable[[float], None]:
    """Something that happens in the first wait; in later ones the file is touched."""
    waits = [first]

    def wait(seconds: float) -> None:
        waits.pop()(seconds) if waits else os.utime(path, (1.0, time.time() + 1.0))

    return wait


def test_the_file_is_touched(tmp_path: Path) -> None:
    path = tmp_path / FILE
    with owning(tmp_path, FIRST, Pace(touch_s=0.01)):
        os.utime(path, (1.0, 1.0))
        deadline = time.monotonic() + 60.0
        while path.stat().st_mtime == 1.0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert path.stat().st_mtime > 1.0


def test_a_job_that_stood_still_finds_that_it_has_lost_its_folder(tmp_path: Path) -> None:
    with owning(tmp_path, FIRST) as check:
        (tmp_path / FILE).write_text('{"run": "second"}')
        with pytest.raises(SavingError, match=r"was taken by another job \(run id second\) while"):
            check()
    assert (tmp_path / FILE).exists()  # it is the other's


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"run": 1}', "\0", "[" * 5000])
def test_a_damaged_file_is_nobodys(tmp_path: Path, content: str) -> None:
    path = left_by(tmp_path, FIRST, 1000.0)
    path.write_text(content)
    os.utime(path, (1.0, 1.0))
    with owning(tmp_path, SECOND, wait=lambda seconds: None) as check:
        check()


def test_what_is_no_file_is_replaced_or_refused(tmp_path: Path) -> None:
    path = tmp_path / FILE
    path.symlink_to("nowhere")
    with owning(tmp_path, FIRST):
        assert not path.is_symlink()
    os.mkfifo(path)
    os.utime(path, (1.0, 1.0))
    with owning(tmp_path, FIRST, wait=lambda seconds: None):
        assert path.is_file()
    path.mkdir()
    os.utime(path, (1.0, 1.0))
    refused = pytest.raises(SavingError, match=r"merak-owner\.json, by which.*\(Is a directory\)")
    with refused, owning(tmp_path, FIRST, wait=lambda seconds: None):
        pass
