"""Storage as S3 has it, in a folder of this machine, for fsspec: `store://bucket/name`.

There are no folders but parts of names, no renames, and a file is there when all of it is; what was
listed once is remembered until it is asked to forget.
"""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path
from typing import Any

import fsspec
from fsspec import AbstractFileSystem

ROOT = "MERAK_TEST_STORE"
"""Variable of the environment that names the folder."""


class ObjectStore(AbstractFileSystem):  # type: ignore[misc]
    """The storage of this machine's folder, seen by all processes that have its name."""

    protocol = "store"
    fail_on = ""
    """Part of the names of files that cannot be uploaded now."""

    def _path(self, name: str) -> Path:
        return Path(os.environ[ROOT], *self._strip_protocol(name).split("/"))

    def _info(self, path: Path) -> dict[str, Any]:
        name = path.relative_to(os.environ[ROOT]).as_posix()
        kind = "directory" if path.is_dir() else "file"
        return {"name": name, "size": 0 if kind == "directory" else path.stat().st_size,
                "type": kind}  # fmt: skip

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        """List what begins with a name, as it was when it was first listed."""
        name = self._strip_protocol(path)
        if name not in self.dircache:
            found = self._path(name)
            if found.is_file():
                self.dircache[name] = [self._info(found)]
            elif found.is_dir() and any(found.rglob("*.*")):
                inner = [one for one in sorted(found.iterdir()) if not one.name.startswith(".up-")]
                self.dircache[name] = [
                    self._info(one) for one in inner if one.is_file() or any(one.rglob("*.*"))
                ]
            else:
                raise FileNotFoundError(name)
        known = self.dircache[name]
        return known if detail else [one["name"] for one in known]

    def invalidate_cache(self, path: str | None = None) -> None:
        """Forget what was listed."""
        self.dircache.clear()

    def put_file(self, lpath: str, rpath: str, **kwargs: Any) -> None:  # type: ignore[override]
        """Upload a file; it is there at once, or not at all."""
        if self.fail_on and self.fail_on in rpath:
            raise ConnectionError(f"no answer while {rpath} was sent")
        path = self._path(rpath)
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".up-{uuid.uuid4().hex}")
        shutil.copyfile(lpath, aside)
        aside.rename(path)

    def get_file(self, rpath: str, lpath: str, **kwargs: Any) -> None:  # type: ignore[override]
        """Download a file."""
        shutil.copyfile(self._path(rpath), lpath)

    def cat_file(self, path: str, **kwargs: Any) -> bytes:  # type: ignore[override]
        """Download a file's bytes."""
        return self._path(path).read_bytes()

    def rm_file(self, path: str) -> None:
        """Remove a file."""
        self._path(path).unlink()

    def exists(self, path: str, **kwargs: Any) -> bool:
        """Whether there is a file."""
        return self._path(path).exists()


fsspec.register_implementation("store", ObjectStore, clobber=True)
