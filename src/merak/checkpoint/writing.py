"""Error messages for files that cannot be written, by whichever library wrote them.

A full disk is an `OSError` in Python, a `RuntimeError` of torch's ("enforce fail at
inline_container.cc"), and an exception of their own in safetensors and tokenizers.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from merak.core.errors import MerakError, SavingError, WeightsError
from merak.graph.weights.rank_agreement import gather_objects, is_distributed

_TORCH_WROTE = ("PytorchStreamWriter", "inline_container.cc", "unexpected pos")
_RUST = re.compile(r"(?:^|: )([^:]*?) \(os error \d+\)")
_IS_FULL = ("no space left", "quota exceeded")
_NEARLY_FULL_BYTES = 2**20


@contextmanager
def writing_into(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Turn the exception of a library that cannot write files into one sentence.

    Raises:
        SavingError: files could not be written. Other exceptions pass.
    """
    try:
        yield
    except MerakError:
        raise
    except (Exception, CheckpointException) as error:  # which is no Exception
        reason = why_not_written(error, folder)
        if reason is None:
            raise
        raise SavingError(f"{os.fspath(folder)} could not be written: {reason}.") from error


def why_not_written(error: BaseException, folder: str | os.PathLike[str]) -> str | None:
    """The reason why files could not be written, and the fix; None for other exceptions.

    Args:
        error: of the library that was writing.
        folder: of the files.
    """
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    reason = _reason(error)
    if reason is None and any(word in str(error) for word in _TORCH_WROTE):
        is_full = _free_bytes(folder) < _NEARLY_FULL_BYTES
        reason = "No space left on device" if is_full else "a file was cut off while it was written"
    if reason is None:
        return None
    if any(word in reason.lower() for word in _IS_FULL):
        free = _free_bytes(folder) / 1e6
        return (
            f"{reason} ({free:,.1f} MB are free there now); make room, keep fewer checkpoints with "
            "save_total_limit, or name another output_dir"
        )
    return f"{reason}; make it writable, or name another output_dir"


def failure_of(error: BaseException, target: Path | str, done: str = "written") -> WeightsError:
    """Turn the failure of a save or load into an error of one sentence.

    Args:
        error: what a rank has raised; DCP's own exception holds those of all ranks.
        target: the folder, or its URL.
        done: "written" or "read".
    """
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, WeightsError):
        return error
    reason = why_not_written(error, target) if done == "written" else None
    kind = WeightsError if reason is None else SavingError
    named = reason or f"{type(error).__name__}: {error}"
    return kind(f"{target} could not be {done}: {named}.")


def together(action: Callable[[], None], target: Path | str, done: str = "written") -> None:
    """Run an action on every rank; if it fails on one, all ranks raise its error. Collective.

    Args:
        action: of this rank.
        target: the folder that it is about, or its URL.
        done: "written" or "read".

    Raises:
        WeightsError: it has failed on a rank.
    """
    failure: WeightsError | None = None
    try:
        action()
    except (Exception, CheckpointException) as error:  # which is no Exception
        failure = failure_of(error, target, done)
    failures = [found for found in gather_objects(failure) if found is not None]
    if failures:
        raise failures[0]


def _reason(error: BaseException) -> str | None:
    if isinstance(error, ConnectionError | TimeoutError):
        return None  # of a network, not of a disk
    if isinstance(error, OSError) and error.errno is not None:
        return error.strerror or os.strerror(error.errno)
    found = _RUST.search(str(error))
    return found.group(1).strip() if found else None


def _free_bytes(folder: str | os.PathLike[str]) -> int:
    wanted = Path(folder).absolute()
    there = next(place for place in (wanted, *wanted.parents) if place.exists())
    return shutil.disk_usage(there).free


@contextmanager
def without_group_warning() -> Iterator[None]:
    """Silence torch's warning about a checkpoint without a process group."""
    with warnings.catch_warnings():
        if not is_distributed():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
