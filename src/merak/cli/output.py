"""Output of commands: a page for people, or one JSON object and nothing else."""

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
    """Redirect output inside to standard error; standard output is for the result."""
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
