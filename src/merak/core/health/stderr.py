"""Lines on standard error that do not mix with those of other ranks."""

from __future__ import annotations

import sys
from typing import TextIO


def write_line(line: str, stream: TextIO | None = None) -> None:
    """Write a line to standard error in one piece.

    `print` writes the end of a line apart where output is unbuffered, so that another rank's line
    may come between.

    Args:
        line: without its end.
        stream: where to, instead of `sys.stderr`.
    """
    stream = stream or sys.stderr
    stream.write(f"{line}\n")
    stream.flush()
