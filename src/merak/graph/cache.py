"""Traces on disk: found by the content that determines them, safe with many ranks at once."""

from __future__ import annotations

import logging
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from filelock import FileLock

from merak.graph.fingerprint import file_hashes
from merak.graph.ir import ModelGraph
from merak.graph.pack import pack_model, unpack_model

logger = logging.getLogger(__name__)

Made = tuple[ModelGraph, frozenset[str]]
"""A model graph, and the source files that its trace ran through."""


def cached(folder: Path, key: str, make: Callable[[], Made]) -> tuple[ModelGraph, bool]:
    """A model graph from disk, or made now and kept.

    Of several ranks that ask at once on one machine, one makes it and the others wait.

    Args:
        folder: the cache's folder, made where it is not there. Its files are read with pickle:
            use a folder that only you can write to.
        key: a fingerprint of what determines the graph.
        make: makes it.

    A folder that cannot be used is warned of once, and gone on without.

    Returns:
        The graph, and whether it came from disk.
    """
    path = folder / f"{key}.graph"
    found = _read(path)
    if found is not None:
        return found, True
    with _locked(folder, key) as is_usable:
        found = _read(path) if is_usable else None
        if found is not None:
            return found, True
        graph, sources = make()
        if is_usable:
            try:
                _write(path, graph, sources)
            except OSError as error:
                warn_unusable(folder, error.strerror or str(error))
        return graph, False


@contextmanager
def _locked(folder: Path, key: str) -> Iterator[bool]:
    """Hold the lock of an entry; whether there is one, since a folder may be of no use."""
    lock = FileLock(folder / f"{key}.lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except (OSError, NotImplementedError) as error:  # the latter where nothing can be locked
        warn_unusable(folder, getattr(error, "strerror", None) or str(error))
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


@lru_cache  # once for each, however many models are traced
def warn_unusable(folder: Path, reason: str) -> None:
    """Say on rank 0 that a cache folder is not used."""
    if os.environ.get("RANK", "0") == "0":
        logger.warning(
            "The folder %s cannot be used for traced models (%s); they are traced anew each time: "
            "name another with trace_cache or MERAK_CACHE, or '' for none.",
            folder,
            reason,
        )


@lru_cache  # an entry is looked at before it is locked and after
def _warn_damaged(path: Path, reason: str) -> None:
    """Say on rank 0 that an entry is of no use."""
    if os.environ.get("RANK", "0") == "0":
        logger.warning("The cached trace %s cannot be read (%s); it is made anew.", path, reason)


def _read(path: Path) -> ModelGraph | None:
    """An entry, unless it is broken or a source file it came from has changed since."""
    try:
        entry = pickle.loads(path.read_bytes())
        if entry["sources"] != file_hashes(entry["sources"]):
            return None
        return unpack_model(entry["graph"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception as error:  # whatever a damaged file may lead to
        _warn_damaged(path, repr(error))
        return None


def _write(path: Path, graph: ModelGraph, sources: frozenset[str]) -> None:
    entry = {"sources": file_hashes(sources), "graph": pack_model(graph)}
    content = pickle.dumps(entry, protocol=pickle.HIGHEST_PROTOCOL)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
