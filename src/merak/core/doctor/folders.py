"""Folders that jobs write beside their results: temporary files, caches of traces and of models."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from merak.core.doctor.finding import Judgement, Level, System, fine
from merak.core.units import size

TEMPORARY_BYTES, TRACES_BYTES, MODELS_BYTES = 10**9, 10**8, 5 * 10**9
"""Free space below which the folders of temporary files, traces and models are short of it."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder that a job writes to.

    Args:
        purpose: what is in it.
        path: the folder, or what is there in its place.
        reason: why no file can be made there; empty where one can.
        free_bytes: on its file system.
        wanted_bytes: free space that it should have.
        fix: what to set to use another one.
        level: of a folder that cannot be written.
    """

    purpose: str
    path: str
    reason: str
    free_bytes: int
    wanted_bytes: int
    fix: str
    level: Level = Level.WARNING


def read_folders(system: System) -> tuple[Folder, ...]:
    """Try to make a file in each folder, and read the free space there.

    Args:
        system: whose environment says where they are.
    """
    own = system.environment
    home = own.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    models = own.get("HF_HOME") or os.path.join(home, "huggingface")
    temporary = own.get("TMPDIR") or tempfile.gettempdir()
    found = [
        ("temporary files", temporary, TEMPORARY_BYTES, "TMPDIR", Level.PROBLEM),
        ("models and data of the hub", models, MODELS_BYTES, "HF_HOME", Level.WARNING),
    ]
    if system.trace_cache:
        found.append(("traces", system.trace_cache, TRACES_BYTES, "MERAK_CACHE", Level.WARNING))
    return tuple(_folder(*one) for one in found)


def _folder(purpose: str, name: str, wanted: int, variable: str, level: Level) -> Folder:
    path = Path(os.path.expanduser(name)).absolute()
    there = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    reason = ""
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"merak")
    except OSError as error:
        reason = error.strerror or str(error)
    try:
        space = os.statvfs(there)
        free = space.f_bavail * space.f_frsize
    except OSError:
        free = 0
    fix = f"let {variable} name a folder on another disk that you may write to"
    return Folder(purpose, str(path), reason, free, wanted, fix, level)


def check_folders(folders: tuple[Folder, ...]) -> Iterator[Judgement]:
    """Check that folders can be written, and have space."""
    fits = []
    for own in folders:
        where = f"{own.path} ({own.purpose})"
        if own.reason:
            yield Judgement(own.level, f"{where} cannot be written: {own.reason}", own.fix)
        elif own.free_bytes < own.wanted_bytes:
            found = f"{where} has {size(own.free_bytes)} free"
            yield Judgement(Level.WARNING, found, f"{own.fix}, or remove files there")
        else:
            fits.append(f"{where} {size(own.free_bytes)} free")
    if len(fits) == len(folders):
        yield fine(", ".join(fits))
