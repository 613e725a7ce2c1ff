"""Folder on storage that fsspec knows: `s3://`, `gs://`, `az://`, `file://` and others."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from fsspec.core import url_to_fs

from merak.core.errors import ArgumentsError, MerakError, SavingError, WeightsError


def is_url(place: object) -> bool:
    """Whether the name of a place is a URL, and not that of a folder.

    Args:
        place: the name, or anything else.
    """
    return isinstance(place, str) and "://" in place


@dataclass(frozen=True)
class RemoteFolder:
    """Folder on storage that fsspec knows. Credentials are those that the storage's package finds.

    Args:
        url: of the folder; it need not be there.
    """

    url: str

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        try:
            return cast("tuple[Any, str]", url_to_fs(self.url))
        except (ImportError, ValueError) as cause:  # no package, or no such protocol
            raise ArgumentsError(f"{self.url} cannot be reached: {cause}.") from cause

    def open(self) -> None:
        """Find the storage's package.

        Raises:
            ArgumentsError: there is none for this protocol, or it is not installed.
        """
        _ = self._opened

    @property
    def name(self) -> str:
        """Last part of the URL."""
        return name_of(self.url)

    def child(self, name: str) -> RemoteFolder:
        """A folder in this one.

        Args:
            name: of it.
        """
        return RemoteFolder(f"{self.url.rstrip('/')}/{name}")

    def sizes(self) -> dict[str, int]:
        """Bytes of all files in it and its folders, by their names from here; empty if none is."""
        files, root = self._opened
        with self._reading():
            files.invalidate_cache()
            found = files.find(root, detail=True)
        own = str(root).rstrip("/")
        return {
            str(path)[len(own) :].lstrip("/"): int(one["size"] or 0) for path, one in found.items()
        }

    def folders(self) -> list[str]:
        """Names of the folders directly in it."""
        files, root = self._opened
        with self._reading():
            files.invalidate_cache()
            try:
                found = files.ls(root, detail=True)
            except FileNotFoundError:
                return []
        return [name_of(str(one["name"])) for one in found if one["type"] == "directory"]

    def has(self, name: str) -> bool:
        """Whether a file is there.

        Args:
            name: of the file.
        """
        files, root = self._opened
        with self._reading():
            files.invalidate_cache()
            return bool(files.exists(f"{root}/{name}"))

    def read_text(self, name: str) -> str | None:
        """Read a text file; None if there is none.

        Args:
            name: of the file.

        Raises:
            WeightsError: it cannot be read.
        """
        files, root = self._opened
        with self._reading():
            try:
                return cast("bytes", files.cat_file(f"{root}/{name}")).decode()
            except FileNotFoundError:
                return None

    def put(self, path: Path, name: str) -> None:
        """Upload a file.

        Args:
            path: of the file on this host.
            name: that it has there.

        Raises:
            SavingError: it cannot be uploaded.
        """
        files, root = self._opened
        place = f"{root}/{name}"
        with self._writing():
            try:
                files.put_file(str(path), place)
            except FileNotFoundError:  # storage with folders, where that of the file is missing
                files.makedirs(place.rsplit("/", 1)[0], exist_ok=True)
                files.put_file(str(path), place)

    def get(self, name: str, path: Path) -> None:
        """Download a file.

        Args:
            name: of it.
            path: where to write it.

        Raises:
            WeightsError: it cannot be downloaded.
        """
        files, root = self._opened
        with self._reading():
            files.get_file(f"{root}/{name}", str(path))

    def remove(self, names: Collection[str]) -> None:
        """Remove files, as far as they are there.

        Args:
            names: of the files.

        Raises:
            SavingError: one cannot be removed.
        """
        files, root = self._opened
        with self._writing():
            for name in names:
                with suppress(FileNotFoundError):
                    files.rm_file(f"{root}/{name}")

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with _failing(WeightsError, f"{self.url} could not be read"):
            yield

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with _failing(SavingError, f"{self.url} could not be written"):
            yield


@contextmanager
def _failing(kind: type[MerakError], what: str) -> Iterator[None]:
    """Turn the exceptions of any storage's package, which have no common class, into one."""
    try:
        yield
    except MerakError:
        raise
    except Exception as cause:
        raise kind(f"{what} ({type(cause).__name__}: {cause}).") from cause


def name_of(place: str) -> str:
    """Last part of a folder's name or URL.

    Args:
        place: the name or URL.
    """
    return place.rstrip("/").rsplit("/", 1)[-1]


def check_writable(url: str, rank: int) -> None:
    """Write a file of a rank's own, and remove it.

    Args:
        url: of the folder.
        rank: this rank, after which the file is named.

    Raises:
        SavingError: it cannot be written or removed.
    """
    with tempfile.NamedTemporaryFile() as probe:
        name = f".merak-probe-{rank}"
        RemoteFolder(url).put(Path(probe.name), name)
        RemoteFolder(url).remove([name])
