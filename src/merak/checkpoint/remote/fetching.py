"""Checkpoints of remote storage, as folders of this host that have the files that are read."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from merak.checkpoint.files import damage
from merak.checkpoint.manifest import MANIFEST, StoredFile, parse_manifest
from merak.checkpoint.remote.committing import manifest_text
from merak.checkpoint.remote.folder import RemoteFolder, is_url
from merak.checkpoint.writing import together
from merak.core.errors import WeightsError
from merak.core.files.json_file import read_json
from merak.graph.weights.rank_agreement import gather_objects

_MARK = ".fetched.json"
"""File of a fetched folder: the URL that it is from, and size and checksum of each file there."""

_TENSORS = ".safetensors"


def has_no_tensors(name: str) -> bool:
    """Whether a file of a checkpoint is fetched at once, and not when a rank opens it.

    Args:
        name: of the file.
    """
    return not name.endswith(_TENSORS)


def fetch(url: str, parent: Path, wanted: Callable[[str], bool] = has_no_tensors) -> Path:
    """Make a folder on this host that stands for a checkpoint of remote storage.

    All processes of a host may call it at once. A folder of an earlier call is used again, as far
    as the checkpoint is the same.

    Args:
        url: of the checkpoint.
        parent: the folder to make it in.
        wanted: which files to fetch now; others come when `local_files` is asked for them.

    Returns:
        The folder.

    Raises:
        WeightsError: there is no checkpoint, it is damaged, or it cannot be read.
    """
    remote = RemoteFolder(url)
    folder = parent / f".{remote.name}.fetched-{socket.gethostname()}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        text = manifest_text(remote)
        manifest = parse_manifest(url, text)
        if not _has(folder / MANIFEST, text):
            shutil.rmtree(folder, ignore_errors=True)
            found = remote.sizes()
            for name, stored in manifest.files.items():
                if found.get(name) != stored.num_bytes:
                    what = f"{name} has {found.get(name, 0):,} of {stored.num_bytes:,} bytes"
                    raise WeightsError(
                        f"{url} is damaged ({what}); resume from another checkpoint."
                    )
            folder.mkdir()
            files = {name: (one.num_bytes, one.checksum) for name, one in manifest.files.items()}
            mark = json.dumps({"url": url, "files": files})
            (folder / _MARK).write_text(mark, encoding="utf-8")
            (folder / MANIFEST).write_text(text, encoding="utf-8")
    place = local_files(folder)
    for name in filter(wanted, sorted(manifest.files)):
        place(name)
    return folder


def fetch_together(url: str, parent: Path, wanted: Callable[[str], bool] = has_no_tensors) -> Path:
    """Fetch a checkpoint on every host; if it fails on a rank, all raise its error. Collective.

    Args:
        url: as of `fetch`.
        parent: as of `fetch`.
        wanted: as of `fetch`.

    Raises:
        WeightsError: as of `fetch`.
    """
    found: list[Path] = []
    together(lambda: found.append(fetch(url, parent, wanted)), url, "read")
    return found[0]


@contextmanager
def opened(
    place: str | os.PathLike[str], wanted: Callable[[str], bool] = has_no_tensors
) -> Iterator[Path]:
    """Context with a checkpoint's folder, into which one of remote storage is fetched. Collective.

    Args:
        place: its folder or URL.
        wanted: as of `fetch`.

    Raises:
        WeightsError: as of `fetch`.
    """
    if not is_url(place):
        yield Path(place)
        return
    host = socket.gethostname()
    with tempfile.TemporaryDirectory(prefix="merak-") as own:
        folders = gather_objects((host, own))
        parent = Path(next(folder for name, folder in folders if name == host))
        yield fetch_together(str(place), parent, wanted)
        gather_objects(None)  # before the folder of the host's first rank goes


def is_fetched(folder: Path) -> bool:
    """Whether a folder stands for a checkpoint of remote storage.

    Args:
        folder: of this host.
    """
    return (folder / _MARK).is_file()


def local_files(folder: Path) -> Callable[[str], Path]:
    """How the files of a checkpoint's folder are found, by their names; a fetched folder's come.

    Args:
        folder: of the checkpoint, on this host.

    Returns:
        A function from the name to the path. It raises `WeightsError` for a file that is not as it
        was written, or cannot be fetched.
    """
    if not is_fetched(folder):
        return folder.joinpath
    mark = read_json(folder / _MARK)
    remote = RemoteFolder(mark["url"])

    def find(name: str) -> Path:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f".{path.name}.lock")):
            if not path.exists():
                partial = f"{name}.partial"
                remote.get(name, folder / partial)
                stored = StoredFile(*mark["files"][name])
                if (problem := damage(folder, {partial: stored}, [partial])) is not None:
                    what = problem.replace(partial, name)
                    raise WeightsError(
                        f"{remote.url} is damaged ({what}); resume from another checkpoint."
                    )
                (folder / partial).rename(path)
        return path

    return find


def forget_tensors(folder: Path) -> None:
    """Remove the tensors' files of a fetched folder, which come again when they are read.

    Args:
        folder: of a checkpoint; nothing is removed from one that is no fetched folder.
    """
    if is_fetched(folder):
        for path in folder.rglob(f"*{_TENSORS}"):
            path.unlink(missing_ok=True)


def remove_fetched(folder: Path) -> None:
    """Remove a fetched folder.

    Args:
        folder: of a checkpoint; nothing is removed if it is no fetched folder.
    """
    if is_fetched(folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.with_name(f"{folder.name}.lock").unlink(missing_ok=True)


def _has(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text
