"""Owner of a folder: the one job that writes there, as a file in it that its rank 0 keeps touching.

A job that was started twice, or that was believed to be dead, would remove what the other one is
writing. So a job owns its folder by a file with its name. It is alive while the file was touched in
the last minute, by the clock of the file system: hosts need not agree on the time.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from merak.core.errors import SavingError
from merak.core.files.json_file import UnreadableFile, read_json
from merak.core.files.private_files import write_aside
from merak.core.health.status import phase
from merak.core.kinds import from_fields

logger = logging.getLogger(__name__)

FILE = ".merak-owner.json"
"""The file, in the folder that is owned."""

NO_RUN_ID = "none"
"""Run id of torchrun where it was given none."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Name of a job, which its restarts share.

    Args:
        run: run id that torchrun was given; empty where it was given none.
        host: of the process that outlives restarts; empty where there is a run id.
        pid: of it: torchrun's agent, or the job itself where it is a single process; 0 as host.
    """

    run: str = ""
    host: str = ""
    pid: int = 0

    def __str__(self) -> str:
        return f"run id {self.run}" if self.run else f"process {self.pid} on {self.host}"


@dataclass(frozen=True, slots=True)
class Pace:
    """Times of an owner, in seconds.

    Args:
        touch_s: between two touches of the file.
        alive_s: after the last one, in which the owner counts as alive.
        poll_s: between two looks at another owner's file.
    """

    touch_s: float = 10.0
    alive_s: float = 60.0
    poll_s: float = 1.0


def this_job(environment: Mapping[str, str] = os.environ) -> Owner:
    """Owner of output folders that this process's job is: its run id, or its agent's host and pid.

    Args:
        environment: of the process.
    """
    run = environment.get("TORCHELASTIC_RUN_ID", NO_RUN_ID)
    if run != NO_RUN_ID:
        return Owner(run)
    return Owner("", socket.gethostname(), os.getppid() if "RANK" in environment else os.getpid())


@contextmanager
def owning(
    folder: Path, owner: Owner, pace: Pace = Pace(), wait: Callable[[float], None] = time.sleep
) -> Iterator[Callable[[], None]]:
    """Own a folder, after waiting for the end of another owner that may be dead.

    Args:
        folder: made where it is not there.
        owner: this job.
        pace: times.
        wait: waits for some seconds.

    Yields:
        A function that raises a `SavingError` if another job has taken the folder meanwhile.

    Raises:
        SavingError: another job that is alive owns it, or the file cannot be written.
    """
    path = folder / FILE
    _take(path, owner, pace, wait)
    has_ended = threading.Event()
    toucher = threading.Thread(
        target=_keep, args=(path, owner, pace, has_ended), daemon=True, name="merak owner"
    )
    toucher.start()
    try:
        yield lambda: _refuse_lost(path, owner)
    finally:
        has_ended.set()
        toucher.join()
        if _read(path) == owner:
            with suppress(OSError):
                path.unlink()


def _take(path: Path, owner: Owner, pace: Pace, wait: Callable[[float], None]) -> None:
    """Make the file this job's, once no other job keeps it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():  # which no job makes, and which may lead nowhere
            path.unlink()
        while (other := _read(path)) != owner:
            if other is None:
                # Where another has come first: look who.
                with suppress(FileExistsError), open(path, "xb") as file:
                    file.write(_content(owner))
                continue
            _wait_for_end(path, other, pace, wait)
            write_aside(path, _content(owner))
            wait(pace.poll_s)  # of two that take it at once, the last one has it
        os.utime(path)
    except OSError as error:
        raise SavingError(
            f"{path}, by which a job owns its output_dir, cannot be written "
            f"({error.strerror or error}); make it writable, or name another output_dir."
        ) from error


def _wait_for_end(path: Path, other: Owner, pace: Pace, wait: Callable[[float], None]) -> None:
    """Wait until another owner has not touched its file for long enough, or see that it lives."""
    first, is_reported = _touched_s(path), False
    while (touched := _touched_s(path)) and _now_s(path) - touched <= pace.alive_s:
        if touched > first or _read(path) != other:
            raise SavingError(
                f"output_dir={str(path.parent)!r} belongs to another job that is running "
                f"({other}), whose checkpoints this one would remove; end that job, or name "
                "another output_dir."
            )
        if not is_reported:
            message = "%s was used by another job (%s); waiting up to %.0f s to see whether it runs"
            logger.warning(message, path.parent, other, pace.alive_s)
            is_reported = True
        with phase("waiting to see whether another job uses output_dir"):
            wait(pace.poll_s)


def _keep(path: Path, owner: Owner, pace: Pace, has_ended: threading.Event) -> None:
    """Touch the file until the job has ended, or another job has taken it."""
    while not has_ended.wait(pace.touch_s):
        with suppress(OSError):  # a file system that is away for a while
            if _read(path) != owner:
                return
            os.utime(path)


def _refuse_lost(path: Path, owner: Owner) -> None:
    other = _read(path)
    if other is not None and other != owner:
        raise SavingError(
            f"output_dir={str(path.parent)!r} was taken by another job ({other}) while this one "
            "stood still; end one of them, or name another output_dir."
        )


def _read(path: Path) -> Owner | None:
    """The owner of a file; None where there is no file. One that cannot be read is nobody's."""
    try:
        return from_fields(Owner, read_json(path))
    except UnreadableFile as error:
        return None if isinstance(error.__cause__, FileNotFoundError) else Owner("unknown")
    except (ValueError, OverflowError):
        return Owner("unknown")


def _content(owner: Owner) -> bytes:
    return (json.dumps(asdict(owner)) + "\n").encode()


def _touched_s(path: Path) -> float:
    """When a file was last touched, by its file system's clock; 0 where there is none."""
    try:
        # Opened: a network file system then asks its server, and does not answer from memory.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        return 0.0
    try:
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)


def _now_s(path: Path) -> float:
    """The time by the clock of a file's file system."""
    probe = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        probe.touch()
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)
