"""Exceptions of libraries about limits of the system, as sentences."""

from __future__ import annotations

import errno
import multiprocessing.synchronize
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from merak.core.doctor.limits import exhausted
from merak.core.errors import MeshError, TrainingError
from merak.core.health import failure

SEMAPHORE = multiprocessing.synchronize._multiprocessing  # type: ignore[attr-defined]


def raised(action: Callable[[], object]) -> BaseException:
    with pytest.raises(Exception) as caught:
        action()
    return caught.value


def failing(error: BaseException, module: str = __name__) -> Callable[..., object]:
    """A function of a module, which raises an error."""
    error = type(error)(*error.args)  # one that was raised before has the frames of then, too
    names = {"__name__": module, "error": error}
    exec("def fail(*args, **kwargs):\n    raise error", names)
    return names["fail"]  # type: ignore[return-value]


def test_shared_memory_that_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(SEMAPHORE, "SemLock", failing(full, "multiprocessing.synchronize"))
    found = exhausted(raised(multiprocessing.get_context("fork").Lock))
    assert found is not None and "are free in /dev/shm; start the container with more" in found
    assert exhausted(raised(failing(full))) is None  # of a disk
    bus = "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that …"
    for text in (bus, "unable to write to file </torch_7_1>: No space left on device (28)"):
        assert exhausted(RuntimeError(text)) == found


def test_files_and_processes_that_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (OSError(errno.EMFILE, "x"), RuntimeError("socket: Too many open files")):
        told = exhausted(error)
        assert told is not None and "and this one needs more; run `ulimit -n 65536`" in told
    busy = BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    monkeypatch.setattr(os, "fork", failing(busy, "multiprocessing.popen_fork"))
    process = multiprocessing.get_context("fork").Process(target=int)
    told = exhausted(raised(process.start))
    assert told is not None and "no further process or thread can be started here" in told
    assert exhausted(raised(failing(busy))) is None  # of a socket
    assert exhausted(RuntimeError("can't start new thread")) == told


def test_what_an_exception_was_raised_from_counts() -> None:
    outer = RuntimeError("the loader has failed")
    outer.__cause__ = ValueError("x")
    outer.__cause__.__context__ = OSError(errno.EMFILE, "x")
    assert exhausted(outer) is not None
    outer.__cause__ = outer
    assert exhausted(outer) is None and exhausted(ValueError("x")) is None


def test_only_exceptions_of_others_are_put_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure, "_limits", [exhausted])
    own, other = MeshError("Too many open files"), OSError(errno.EMFILE, "x")
    assert failure.in_words(own) is own
    assert isinstance(failure.in_words(other), TrainingError)


def test_a_job_with_few_files_ends_with_a_line(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import resource\n"
        "import merak\n"
        "merak.init(device='cpu')\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "held = [open('/dev/null') for _ in range(100)]\n"
    )
    ended = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == 1
    (line,) = [own for own in ended.stderr.splitlines() if own.strip()]
    assert line.startswith("merak: a process here may have 64 open files at most, and this one")
    assert line.endswith("script.py:5]")
