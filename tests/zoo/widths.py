"""Fill the zoo's column of real widths: `python -m tests.zoo.widths docs/zoo.md [--empty]`.

A few layers of every architecture's own widths are traced and sharded without weights, which takes
seconds each. The column is written into the page as it stands; cells of other tasks stay, and with
`--empty` those that are filled, so that the page may be filled in several runs. An architecture is
given up by the processor time and the memory that it takes, so that other work on the machine
changes no cell.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import re
import resource
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from merak.check import Layout
from merak.zoo.request import Request
from merak.zoo.widths_by_name import sharded_at_real_widths
from tests.zoo.architectures import LISTS
from tests.zoo.table import plain_reason

TP = 8
COLUMN = f"tp={TP}, real widths"
MOST_S = 300
"""Seconds of processor time after which an architecture is given up."""

MOST_BYTES = 8 * 2**30
"""Memory that an architecture may take: some unroll long loops."""

TOO_LONG = f"no: over {MOST_S} s"
TOO_LARGE = f"no: over {MOST_BYTES >> 30} GiB"

_ROW = re.compile(r"\| `(?P<name>\w+)` \| (?P<traces>[\w ]+) \|")


def main() -> None:
    """Fill the cells of the tasks that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("--task", nargs="*", default=list(LISTS), choices=list(LISTS))
    parser.add_argument("--empty", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = arguments.page.read_text(encoding="utf-8").splitlines()
    task = ""
    for number, line in enumerate(lines):
        if line.startswith("## "):
            task = line[3:]
        if not any(task.lower() == own.lower() for own in arguments.task):
            continue
        cells = _cells(line)
        is_filled = len(cells) == 7 and cells[6] != ""
        lines[number] = _with_cell(line, not (arguments.empty and is_filled))
        if lines[number] != line:
            arguments.page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    arguments.page.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _with_cell(line: str, wanted: bool) -> str:
    """A line of the page with its cell of the column."""
    cells = _cells(line)
    if cells[:1] == ["architecture"]:
        return line if cells[-1] == COLUMN else f"{line} {COLUMN} |"
    if cells == ["---"] * 6:
        return f"{line} --- |"
    found = _ROW.match(line)
    if found is None:
        return line
    if wanted and found["traces"] == "yes":
        return f"| {' | '.join((*cells[:6], _cell(found['name'])))} |"
    return line if len(cells) == 7 else f"{line}  |"


def _cells(line: str) -> list[str]:
    """What stands between the bars of a line of a table; a bar in a text has a backslash."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def _cell(name: str) -> str:
    """Fraction that is split, and the collectives of a layer's forward and backward.

    A child process finds it: one that needs more than it may have ends alone.
    """
    processes = multiprocessing.get_context("fork")
    receiving, sending = processes.Pipe(duplex=False)
    child = processes.Process(target=_send_cell, args=(name, sending))
    child.start()
    sending.close()
    try:
        cell = str(receiving.recv())
    except EOFError:  # it was ended without a word
        cell = ""
    child.join()
    cell = cell or (TOO_LONG if child.exitcode == -signal.SIGXCPU else TOO_LARGE)
    print(f"{name}: {cell}", flush=True)
    return cell


def _send_cell(name: str, sending: Connection) -> None:
    """Send one architecture's cell, in a process of its own."""
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    # The limit ends the process: nothing that the trace catches can go on behind it.
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_S, 2 * MOST_S))
    try:
        with contextlib.redirect_stdout(None):
            found = sharded_at_real_widths(Request(name), Layout(tp=TP), {})
        cell = f"{found.split:.1%} ({found.forward} + {found.backward})"
    except Exception as error:  # of one architecture; the others go on
        cell = TOO_LARGE if _is_for_memory(error) else f"no: {plain_reason(str(error))}"
    sending.send(cell)


def _is_for_memory(error: BaseException | None) -> bool:
    """Whether an error, or what it comes from, is a lack of memory."""
    if error is None:
        return False
    is_own = isinstance(error, MemoryError) or "can't allocate memory" in str(error)
    return is_own or _is_for_memory(error.__cause__ or error.__context__)


if __name__ == "__main__":
    main()
