"""Trace cache on disk: keyed by fingerprint, safe with many ranks at once.

A file holds a graph as values without code (`merak.graph.cache.value_file`), so a file that
somebody else has planted runs nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from filelock import FileLock

from merak.core.files.private_files import private_folder, read_cached, write_own_file
from merak.core.rank0 import warn_once
from merak.graph.cache.fingerprint import file_hashes
from merak.graph.cache.json_values import NotStorable
from merak.graph.cache.value_file import ValueFile, write_values
from merak.graph.ir.ir import ModelGraph
from merak.graph.ir.serialize import pack_model, unpack_model

logger = logging.getLogger(__name__)

Made = tuple[ModelGraph, frozenset[str] | None]
"""A model graph, and the source files that its trace ran through; None where it is not stored."""


Adopt = Callable[[ModelGraph], None]


def cached(
    folder: Path, key: str, make: Callable[[], Made], adopt: Adopt | None = None
) -> tuple[ModelGraph, bool]:
    """Model graph from disk, or traced now and stored.

    Of several ranks that ask at once on one machine, one makes it and the others wait. A graph that
    holds an object of a class that is no data is not stored.

    Args:
        folder: the cache's folder; made for this user alone where it is not there. Of its files,
            only those are read that belong to this user and that nobody else may write to.
        key: a fingerprint of what determines the graph.
        make: makes it.
        adopt: connects a graph that was read to this process's model, or raises if it does not fit.

    A folder that cannot be used is warned of once, and gone on without.

    Returns:
        The graph, and whether it came from disk.
    """
    path = folder / f"{key}.graph"
    found = _read(path, adopt, logging.DEBUG)  # it is read again, by one rank, before it is remade
    if found is not None:
        return found, True
    with _locked(folder, key) as is_usable:
        found = _read(path, adopt, logging.WARNING) if is_usable else None
        if found is not None:
            return found, True
        graph, sources = make()
        if is_usable and sources is not None:
            try:
                _write(path, graph, sources)
            except OSError as error:
                warn_unusable(folder, error.strerror or str(error))
        return graph, False


@contextmanager
def _locked(folder: Path, key: str) -> Iterator[bool]:
    """Hold the lock of an entry; yields whether the folder is usable."""
    lock = FileLock(folder / f"{key}.lock")
    try:
        private_folder(folder)
        lock.acquire()
    except (OSError, NotImplementedError) as error:  # the latter where nothing can be locked
        warn_unusable(folder, getattr(error, "strerror", None) or str(error))
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def warn_unusable(folder: Path, reason: str) -> None:
    """Warn once that a cache folder is not used."""
    warn_once(
        logger,
        "The folder %s cannot be used for traced models (%s); they are traced anew each time: "
        "name another with trace_cache or MERAK_CACHE, or MERAK_CACHE=off for none.",
        folder,
        reason,
    )


def _read(path: Path, adopt: Adopt | None, level: int) -> ModelGraph | None:
    """Entry of the cache, unless it is damaged or a source file of it has changed since."""

    def parse(content: bytes) -> ModelGraph | None:
        held = ValueFile(content)
        sources = held["sources"]
        if sources != file_hashes(sources):
            return None
        graph = unpack_model(held["graph"])
        if adopt is not None:
            adopt(graph)
        return graph

    return read_cached(path, parse, "trace", partial(logger.log, level))


def _write(path: Path, graph: ModelGraph, sources: frozenset[str]) -> None:
    try:
        content = write_values({"sources": file_hashes(sources), "graph": pack_model(graph)})
    except NotStorable as error:
        logger.info("The trace is not stored: it holds a %s, which is no plain data.", error)
        return
    write_own_file(path, content)
