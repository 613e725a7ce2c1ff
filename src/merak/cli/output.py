"""Output of commands: a page for people, or one JSON object and nothing else."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
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


def lines_of(described: Mapping[str, str]) -> str:
    """Names with what they are, a line each, cut at the width of the terminal, if there is one.

    Args:
        described: what each is, by name.
    """
    width, columns = max(map(len, described)), shutil.get_terminal_size((0, 0)).columns

    def cut(line: str) -> str:
        return line if not columns or len(line) <= columns else f"{line[: columns - 1]}…"

    return "\n".join(cut(f"{name:<{width}}  {what}") for name, what in described.items())
