"""Files of a checkpoint: written aside, synced to disk, committed by one rename, and verified."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path

import xxhash

from merak.checkpoint.manifest import MANIFEST, Manifest, StoredFile
from merak.core.errors import WeightsError
from merak.core.files.private_files import give_usual_modes, sync

_CHUNK_BYTES = 2**16
"""Bytes read at once: a larger buffer would stay in the memory of every thread that saves."""


def partial_folder(target: Path) -> Path:
    """Return the folder in which a checkpoint is written before it takes its place."""
    return target.with_name(f".{target.name}.partial")


def _replaced_folder(target: Path) -> Path:
    return target.with_name(f".{target.name}.old")


def start_partial(target: Path) -> Path:
    """Make the folder in which a checkpoint is written, empty."""
    folder = partial_folder(target)
    _remove(folder)
    folder.mkdir(parents=True)
    return folder


def _remove(path: Path) -> None:
    """Remove a folder, or the link or file in its place, as far as that is possible."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def set_aside(folder: Path) -> Path:
    """Rename what has a checkpoint's name and is none, so that one can be saved there.

    Args:
        folder: of the name; whatever it is.

    Returns:
        Where it is now: hidden, beside its place.

    Raises:
        OSError: it cannot be renamed.
    """
    aside = folder.with_name(f".{folder.name}.damaged")
    for number in count(2):
        if not os.path.lexists(aside):
            break
        aside = folder.with_name(f".{folder.name}.damaged-{number}")
    folder.rename(aside)
    return aside


def record_file(path: Path) -> StoredFile:
    """Sync a file to disk, and read back its size and checksum."""
    sync(path)
    return StoredFile(path.stat().st_size, _checksum(path))


def inner_files(folder: Path) -> Iterator[str]:
    """Yield the names of all files in a folder, with those of its folders before them."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path.relative_to(folder).as_posix()


def commit(target: Path, manifest: Manifest) -> None:
    """Rename a written checkpoint to its final folder.

    Args:
        target: its folder; one that is there is replaced.
        manifest: of all files that ranks have written into the partial folder.

    Raises:
        WeightsError: a file is not there, or not whole: the ranks do not share this folder.
    """
    folder = partial_folder(target)
    for name, stored in manifest.files.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != stored.num_bytes:
            what = f"has {found:,} of {stored.num_bytes:,} bytes" if found else "is not there"
            raise WeightsError(
                f"{name} of the checkpoint {what} in {folder} on rank 0, though a rank has written "
                "it; all hosts must share output_dir, on one file system."
            )
    give_usual_modes(folder)
    (folder / MANIFEST).write_text(manifest.text(), encoding="utf-8")
    for place in (folder / MANIFEST, *{folder, *((folder / n).parent for n in manifest.files)}):
        sync(place)
    replaced = _replaced_folder(target)
    _remove(replaced)
    if os.path.lexists(target):
        target.rename(replaced)
    folder.rename(target)
    sync(target.parent)
    _remove(replaced)


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint; cut off half-way, it is no checkpoint any more."""
    removed = folder.with_name(f".{folder.name}.removed")
    _remove(removed)
    folder.rename(removed)
    _remove(removed)


def remove_partial(parent: Path) -> None:
    """Remove what jobs that were killed while they saved, or had fetched a checkpoint, have left.

    Args:
        parent: the folder of the checkpoints.
    """
    for kind in ("partial", "removed", "fetched-*"):
        for folder in parent.glob(f".checkpoint-*.{kind}"):
            _remove(folder)
    for folder in parent.glob(".checkpoint-*.old"):
        target = folder.with_name(folder.name.removeprefix(".").removesuffix(".old"))
        if target.exists():
            _remove(folder)
        else:  # killed between two renames
            folder.rename(target)


def damage(folder: Path, files: Mapping[str, StoredFile], names: Iterable[str]) -> str | None:
    """Find the first of some files of a checkpoint that is not as it was written.

    Args:
        folder: of the checkpoint.
        files: of its manifest.
        names: of the files to read.

    Returns:
        What is wrong, or None.
    """
    for name in names:
        path = folder / name
        try:
            if path.resolve() != folder.resolve() / name or not path.is_file():  # or a link
                return f"{name} is missing"
            num_bytes = path.stat().st_size
            if num_bytes != files[name].num_bytes:
                return f"{name} has {num_bytes:,} bytes in the place of {files[name].num_bytes:,}"
            if _checksum(path) != files[name].checksum:
                return f"{name} has another checksum than when it was written"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror or error}"
    return None


def _checksum(path: Path) -> str:
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(_CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()
