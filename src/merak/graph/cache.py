"""Traces on disk: found by the content that determines them, safe with many ranks at once."""

from __future__ import annotations

import logging
import os
import pickle
import tempfile
from collections.abc import Callable
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

    Returns:
        The graph, and whether it came from disk.
    """
    path = folder / f"{key}.graph"
    found = _read(path)
    if found is not None:
        return found, True
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f"{key}.lock"):
        found = _read(path)
        if found is not None:
            return found, True
        graph, sources = make()
        _write(path, graph, sources)
        return graph, False


def _read(path: Path) -> ModelGraph | None:
    """An entry, unless it is broken or a source file it came from has changed since."""
    try:
        entry = pickle.loads(path.read_bytes())
        if entry["sources"] != file_hashes(entry["sources"]):
            return None
        return unpack_model(entry["graph"])
    except FileNotFoundError:
        return None
    except Exception as error:  # whatever a damaged file may lead to
        logger.warning("The cached trace %s cannot be read (%r); it is made anew.", path, error)
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
