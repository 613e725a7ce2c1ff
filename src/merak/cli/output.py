"""What commands print: a page for people, or one JSON object and nothing else."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TypeVar

Report = TypeVar("Report")


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send what anything prints inside to standard error; standard output is for the result."""
    with redirect_stdout(sys.stderr):
        yield


def show(report: Report, page: Callable[[Report], str], as_json: bool) -> None:
    """Print a command's result on standard output.

    Args:
        report: a dataclass instance.
        page: makes the page for people.
        as_json: print the report's fields as one JSON object instead.
    """
    if as_json:
        print(json.dumps(dataclasses.asdict(report)))  # type: ignore[call-overload]
    else:
        print(page(report))


def count(number: int) -> str:
    """A count as people say it: 124.4 million."""
    for size, word in ((10**12, "trillion"), (10**9, "billion"), (10**6, "million")):
        if number >= size:
            return f"{number / size:.1f} {word}"
    return f"{number:,}"


def size(num_bytes: int) -> str:
    """A size in bytes as people say it: 1.5 GB."""
    for unit_bytes, unit in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if num_bytes >= unit_bytes:
            return f"{num_bytes / unit_bytes:.1f} {unit}"
    return f"{num_bytes} B"
