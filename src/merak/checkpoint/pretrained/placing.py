"""Finished files take their places: a whole folder by one rename, or one file after another.

A file comes to its place only when all of them are on disk. Where the folder is there already, the
index of the weights comes last, and files of other weights go after it: no reader ever finds an
index that names files which are missing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from merak.checkpoint.pretrained.splitting import INDEX, is_weights
from merak.core.errors import SavingError
from merak.core.files.private_files import give_usual_modes, sync, sync_folder


def unfinished_folder(target: Path) -> Path:
    """The hidden folder in which files are prepared, on the file system of their places.

    Args:
        target: the folder that is to appear, beside it, or whose files are to be replaced, in it.
    """
    if target.is_dir():
        return target / ".merak.partial"
    place = target.absolute()
    return place.with_name(f".{place.name}.partial")


def start_folder(target: Path, unfinished: Path) -> None:
    """Make the hidden folder of a target anew.

    Args:
        target: as in `unfinished_folder`.
        unfinished: the hidden folder.

    Raises:
        NotADirectoryError: the target is a file.
    """
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(f"{target} is a file")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)


@contextmanager
def written_folder(target: Path) -> Iterator[Path]:
    """Context that gives the hidden folder of a target, which takes its place at the end.

    Args:
        target: as in `unfinished_folder`.

    Raises:
        SavingError: it cannot be written; nothing is left of it.
    """
    unfinished = unfinished_folder(target)
    try:
        start_folder(target, unfinished)
        yield unfinished
        place_folder(unfinished, target)
    except OSError as error:
        raise SavingError(
            f"{target} could not be written: {error.strerror or error}; make room, make it "
            "writable, or name another folder."
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def place_folder(unfinished: Path, target: Path) -> None:
    """Rename a finished folder, or its files one by one, to the target.

    Args:
        unfinished: as `start_folder` has made it, with all files.
        target: the folder; other files that are in it stay.
    """
    give_usual_modes(unfinished)
    sync_folder(unfinished)
    if not target.exists():
        unfinished.rename(target)
        sync(target.resolve().parent)
        return
    new = {path.relative_to(unfinished) for path in unfinished.rglob("*") if not path.is_dir()}
    for name in sorted(new, key=_index_last):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(unfinished / name, target / name)
    sync(target)
    if any(is_weights(str(name)) for name in new):
        there = {Path(path.name) for path in target.iterdir()}
        stale = [name for name in there - new if is_weights(str(name)) or str(name) == INDEX]
        for name in sorted(stale, key=_index_last, reverse=True):
            (target / name).unlink()
    shutil.rmtree(unfinished)


def _index_last(name: Path) -> tuple[bool, str]:
    return str(name) == INDEX, str(name)
