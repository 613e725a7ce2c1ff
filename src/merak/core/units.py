"""Units: counts and sizes formatted for people, and tables of them."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

_SIZE = re.compile(r"(\d+(?:[._]\d+)*(?:e\d+)?) ?([kmgtp]?)(i?)(b?)(?:/s)?", re.IGNORECASE)
_POWERS = " kmgtp"


def read_bytes(written: object) -> object:
    """Read a size as people write it: "80GB", "80 GiB", "1.5tb"; a rate may end in "/s".

    Args:
        written: a text; anything else, and a text that is no size, is given back as it is.

    Returns:
        Whole bytes: 10^9 of a GB, 2^30 of a GiB.
    """
    found = _SIZE.fullmatch(written.strip()) if isinstance(written, str) else None
    if found is None:
        return written
    number, prefix, binary, _ = found.groups()
    unit = (1024 if binary else 1000) ** _POWERS.index(prefix.lower() or " ")
    return round(float(number.replace("_", "")) * unit)


def count(number: int) -> str:
    """Format a count: 124.4 million."""
    for size, word in ((10**12, "trillion"), (10**9, "billion"), (10**6, "million")):
        if number >= size:
            return f"{number / size:.1f} {word}"
    return f"{number:,}"


def counted(number: int, noun: str) -> str:
    """Format a number of things: 1 microbatch, 16 microbatches, 2,048 samples."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def size(num_bytes: int, digits: int = 1) -> str:
    """Format a size in bytes: 1.5 GB, with so many digits after the point."""
    for unit_bytes, unit in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if num_bytes >= unit_bytes:
            return f"{num_bytes / unit_bytes:.{digits}f} {unit}"
    return f"{num_bytes} B"


def seconds(duration_s: float) -> str:
    """Format a duration: 9.720 ms, 12.3 µs."""
    if duration_s >= 1:
        return f"{duration_s:.3f} s"
    return f"{duration_s * 1e3:.3f} ms" if duration_s >= 1e-3 else f"{duration_s * 1e6:.1f} µs"


def step_time(seconds: float) -> str:
    """Format the time of a step: 0.473 s, 12.4 s, 85 ms."""
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"


def ranges(numbers: range | list[int]) -> str:
    """Format whole numbers as ranges: 0–3, 6."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{p[0]}–{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def table_lines(
    rows: Sequence[Sequence[object]], left: Collection[int] = (), indent: str = ""
) -> list[str]:
    """Lines of a table of text.

    Args:
        rows: cells of each, the headings first where there are some.
        left: numbers of the columns of words; others are of numbers, which go to the right.
        indent: in front of every line.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    for place in range(len(rows[0])):
        table.add_column(justify="left" if place in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    console = Console(width=10**6, color_system=None)
    with console.capture() as drawn:
        console.print(table)
    return [f"{indent}{line}".rstrip() for line in drawn.get().splitlines()]
