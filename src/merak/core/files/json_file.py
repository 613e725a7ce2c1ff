"""JSON files, read as what may be damaged, foreign or no file at all.

Python's own reader waits for a pipe, takes one of two values under the same name without a word,
knows numbers that JSON has not, and ends in a `RecursionError` where lists are nested deeply. This
one gives the value, or the rest of a sentence about the file.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable
from typing import Any

MOST_BYTES = 2**28
"""Size of the largest file that is read, unless the caller knows of larger ones."""

MOST_LEVELS = 100
"""Number of lists and objects inside one another; nothing that is written here has a tenth."""


class UnreadableFile(ValueError):
    """Error about a file or text that gives no value.

    The message is the end of a sentence that begins with its name: "cannot be read (…)" or "is not
    JSON (…)". A file that is not there has a `FileNotFoundError` as its cause.
    """


def read_json(
    path: str | os.PathLike[str],
    *,
    finite: bool = True,
    convert: Callable[[dict[str, Any]], Any] | None = None,
) -> Any:
    """Read the value of a JSON file.

    Args:
        path: of a regular file.
        finite: as of `parse_json`.
        convert: as of `parse_json`.

    Raises:
        UnreadableFile: it cannot be read, or holds no JSON.
    """
    return parse_json(read_text(path), finite=finite, convert=convert)


def read_text(path: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> str:
    """Read a text file; a pipe, a device or a folder is refused without waiting for it.

    Args:
        path: of a regular file.
        most_bytes: size above which it is not read.

    Raises:
        UnreadableFile: it cannot be read, is larger, or holds no UTF-8.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise UnreadableFile("cannot be read (it is no regular file)")
            if found.st_size > most_bytes:
                most = f"{most_bytes:,} bytes at most"
                raise UnreadableFile(f"cannot be read (it has {found.st_size:,} bytes; {most})")
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise UnreadableFile(f"cannot be read ({error.strerror or error})") from error
    except UnreadableFile:
        raise
    except ValueError as error:  # a path with NUL
        raise UnreadableFile(f"cannot be read ({error})") from error
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        where = f"byte {error.start:,} is no UTF-8"
        raise UnreadableFile(f"cannot be read (it is no text: {where})") from error


def parse_json(
    text: str, *, finite: bool = True, convert: Callable[[dict[str, Any]], Any] | None = None
) -> Any:
    """Parse JSON that has one meaning.

    Args:
        text: of one value.
        finite: whether NaN and infinity are refused, which Python writes and JSON has not.
        convert: makes something else of every object.

    Raises:
        UnreadableFile: it is no JSON, gives a name twice, is nested too deeply, or has a number or
            a text that cannot be written again.
    """

    def of_pairs(pairs: list[tuple[str, Any]]) -> Any:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in found if names.count(name) > 1)
            raise ValueError(f"{twice!r} is given twice")
        return found if convert is None else convert(found)

    def number(text: str) -> float:
        value = float(text)
        if finite and not math.isfinite(value):
            raise ValueError(f"{text[:40]} is no finite number")
        return value

    try:
        found = json.loads(
            text, object_pairs_hook=of_pairs, parse_float=number, parse_constant=number
        )
        _check(found)
    except RecursionError:
        raise UnreadableFile(f"is not JSON (it has more than {MOST_LEVELS} levels)") from None
    except ValueError as error:
        raise UnreadableFile(f"is not JSON ({error})") from error
    return found


def parse_value(text: str) -> Any:
    """Parse the value of an option of the command line: JSON, or where it is none, the text.

    Args:
        text: as it was typed.
    """
    try:
        return parse_json(text, finite=False)
    except UnreadableFile:
        return text


def _check(value: Any) -> None:
    """Refuse values that functions cannot walk through, and texts that no file or name can hold."""
    level, levels = [value], 0
    while level:
        if levels > MOST_LEVELS:
            raise RecursionError
        inner: list[Any] = []
        for own in level:
            if isinstance(own, dict):
                inner += own.keys()
                inner += own.values()
            elif isinstance(own, list):
                inner += own
            elif isinstance(own, str) and ("\0" in own or _has_half_pair(own)):
                raise ValueError(f"{own[:40]!r} is no text: it has NUL, or half of a character")
        level, levels = inner, levels + 1


def _has_half_pair(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
