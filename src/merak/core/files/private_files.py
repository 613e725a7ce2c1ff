"""Files that appear whole or not at all, and their modes: for one user alone, or by the umask."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Value = TypeVar("Value")

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class ForeignFile(OSError):
    """Error about a file that another user owns or may change; the message says which and why."""


def private_folder(path: Path) -> Path:
    """Make a folder that only this user can enter, if it is not there yet.

    Args:
        path: the folder; one that is there keeps its mode. Its parents are made as usual.

    Returns:
        The path.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def own_folder(path: Path) -> Path:
    """Make a folder under a name that others can guess, or find it as this user has made it.

    Args:
        path: in a folder where others may write, such as the one for temporary files.

    Returns:
        The path, which only this user can enter.

    Raises:
        ForeignFile: another user made it, or may enter it; or it is no folder but a link to one.
    """
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise ForeignFile(f"{path} is no folder")
    if hasattr(os, "getuid") and (found.st_uid != os.getuid() or found.st_mode & 0o077):
        mode = stat.S_IMODE(found.st_mode)
        raise ForeignFile(f"{path} is not this user's alone (uid {found.st_uid}, mode {mode:o})")
    return path


def read_own_file(path: Path) -> bytes:
    """Read a file that this user, or root, owns and that nobody else may write to.

    Args:
        path: of a regular file; a pipe or a device is refused without waiting for it.

    Raises:
        FileNotFoundError: there is none.
        ForeignFile: another user owns it or may have changed it.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ForeignFile(f"{path} is no regular file")
        if hasattr(os, "getuid"):  # elsewhere files have no such owner
            if found.st_uid not in (0, os.getuid()):
                raise ForeignFile(f"{path} belongs to another user (uid {found.st_uid})")
            if found.st_mode & _OTHERS_WRITE:
                mode = stat.S_IMODE(found.st_mode)
                raise ForeignFile(f"{path} may be written by other users (mode {mode:o})")
        return file.read()


def read_cached(
    path: Path, parse: Callable[[bytes], Value], what: str, log: Callable[..., None]
) -> Value | None:
    """Read a file of a cache, which may cost a warning, and never the job.

    Args:
        path: of the file.
        parse: makes the value of its content, or raises an exception of whatever kind.
        what: the file as a noun, such as "trace".
        log: method of a logger that is told of a file that cannot be read.

    Returns:
        The value; None where there is no file, where others may have written it, or where it is
        damaged.
    """
    try:
        return parse(read_own_file(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception as error:
        name = type(error).__name__
        log("The cached %s %s cannot be read (%s: %s); it is made anew.", what, path, name, error)
        return None


def write_own_file(path: Path, content: bytes) -> None:
    """Write a file that `read_own_file` reads, whatever the umask; the last writer wins.

    Args:
        path: of the file, which appears whole or not at all. Its folder is made as by
            `private_folder`.
        content: of it.

    Raises:
        OSError: it cannot be written.
    """
    private_folder(path.parent)
    write_aside(path, content, mode=0o600)


def write_aside(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Write a file so that a reader finds the earlier one or all of this one; the last writer wins.

    Args:
        path: of the file.
        content: of it.
        mode: of the file, less what the umask takes.

    Raises:
        OSError: it cannot be written; the earlier one stays.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk.

    Args:
        path: of the file or folder.
    """
    if path.is_dir() and os.name == "nt":
        return  # Windows opens no folders
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Wait until a folder and all that is in it are on disk.

    Args:
        folder: of any depth.
    """
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def give_usual_modes(folder: Path) -> None:
    """Set the mode of all files in a folder to that of new files under the umask.

    Libraries that write a temporary file and rename it, as safetensors does, leave it to its owner
    alone, whatever the umask says.
    """
    probe = folder / ".mode"
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file() and stat.S_IMODE(path.stat().st_mode) != mode:
            path.chmod(mode)
