"""Figures of devices as tables of the benchmarks page, one section for each device."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BEGIN = "<!-- make gpu writes what follows, from the files in docs/gpu -->"
END = "<!-- until here -->"
NONE_YET = "No figures have been recorded yet: nobody has run this on a GPU."


def page_with(page: str, found: Sequence[Mapping[str, Any]]) -> str:
    """The page with the figures of all devices between its two marks.

    Raises:
        ValueError: the page has no such marks.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks the lines {BEGIN!r} and {END!r}; put them in.")
    text = "\n".join(section(one) for one in found) if found else f"{NONE_YET}\n"
    return f"{before}{BEGIN}\n\n{text}\n{END}{after}"


def load(folder: Path) -> list[dict[str, Any]]:
    """What has been recorded, by the name of the device."""
    return [json.loads(file.read_text("utf-8")) for file in sorted(folder.glob("*.json"))]


def section(found: Mapping[str, Any]) -> str:
    """One device's machine and tables."""
    machine = found["machine"]
    told = ", ".join(f"{key} {text(value)}" for key, value in machine.items() if value)
    lines = [f"### {machine['device']}", "", f"{found['date']}: {told}.", ""]
    for part in found["parts"]:
        lines += [f"#### {part['title']}", ""]
        lines += [*table(part["rows"]), ""] if part["rows"] else []
        lines += [f"- failed: {escaped(reason)}" for reason in failures(part)]
        lines += [""] if failures(part) else []
    return "\n".join(lines)


def failures(part: Mapping[str, Any]) -> list[str]:
    """What did not come to figures, in a part as a whole or in one of its rows."""
    whole = [part["failed"]] if part["failed"] else []
    return [*whole, *(row["failed"] for row in part["rows"] if row.get("failed"))]


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rows as a Markdown table; those that failed are told apart from it."""
    good = [row for row in rows if not row.get("failed")]
    heads = list(dict.fromkeys(head for row in good for head in row))
    if not heads:
        return []
    lines = [heads, ["---"] * len(heads)]
    lines += [[escaped(text(row.get(head, ""))) for head in heads] for row in good]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,g}"


def escaped(words: str) -> str:
    return words.replace("|", "\\|").replace("\n", " ")
