"""Printing of results: a description of the machine and a small table, or one JSON object."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from merak.plan.cost.benchmark import device_name


def parser(description: str | None) -> argparse.ArgumentParser:
    """Arguments that every benchmark takes."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return made


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": device_name(torch.device("cpu")),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(pages * page_bytes / 1e9),
        "gpus": gpus,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def show(tables: Mapping[str, Sequence[Mapping[str, Any]]], as_json: bool) -> None:
    """Print results.

    Args:
        tables: by title, one mapping per line; what a line has not is left empty.
        as_json: one JSON object instead of tables.
    """
    found = machine()
    if as_json:
        print(json.dumps({"machine": found, "tables": tables}))
        return
    print(", ".join(f"{key}: {value}" for key, value in found.items() if value))
    for title, rows in tables.items():
        print(f"\n{title}\n")
        heads = list(max(rows, key=len))
        cells = [heads, *([_cell(row.get(head, "")) for head in heads] for row in rows)]
        widths = [max(len(line[column]) for line in cells) for column in range(len(heads))]
        rule = ["-" * width for width in widths]
        for line in (cells[0], rule, *cells[1:]):
            texts = [text.ljust(width) for text, width in zip(line, widths, strict=True)]
            print("| " + " | ".join(texts) + " |")


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


_NUMBER = re.compile(r"\d+(?:\.\d+)?")

_MOST = 0.02
"""What numbers of a page, most of two decimals, may differ by from those that come out; those of
more decimals by less."""


def check(tables: Mapping[str, Sequence[Mapping[str, Any]]], page: Path) -> None:
    """Refuse a page that has not the rows of some tables, numbers but for their last digit.

    Args:
        tables: as of `show`.
        page: of Markdown.

    Raises:
        SystemExit: a row is not there; it is named.
    """
    lines = [line for line in page.read_text().splitlines() if line.startswith("|")]
    printed = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    for title, rows in tables.items():
        for row in rows:
            own = [_cell(value).strip() for value in row.values()]
            if not any(_agree(own, other) for other in printed):
                raise SystemExit(f"{page} has no row of {title} that agrees with {own}.")


def _agree(own: Sequence[str], other: Sequence[str]) -> bool:
    if len(own) != len(other):
        return False
    for one, two in zip(own, other, strict=True):
        if _NUMBER.sub("#", one) != _NUMBER.sub("#", two):
            return False
        for ours, theirs in zip(_NUMBER.findall(one), _NUMBER.findall(two), strict=True):
            if abs(float(ours) - float(theirs)) > min(_MOST, _last_but_one(theirs)) + 1e-9:
                return False
    return True


def _last_but_one(number: str) -> float:
    """What the last digit but one counts, of a number with decimals."""
    decimals = len(number.partition(".")[2])
    return 10.0 ** (1 - decimals) if decimals else _MOST
