"""Terminals, and handlers of logging that write into one beside a display."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO


def is_terminal(stream: TextIO) -> bool:
    """Whether a stream is a terminal on which lines can be drawn over."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


@contextmanager
def handlers_moved(old: TextIO, new: TextIO) -> Iterator[None]:
    """Context in which logging handlers of one stream write to another.

    A handler keeps the stream that was there when it was made, and would write over a display that
    has taken the stream's place.

    Args:
        old: that they write to.
        new: that they write to instead.
    """
    named = [logging.getLogger(name) for name in list(logging.root.manager.loggerDict)]
    moved = []
    for logger in (logging.root, *named):
        for handler in logger.handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is old:
                handler.setStream(new)
                moved.append(handler)
    try:
        yield
    finally:
        for handler in moved:
            handler.setStream(old)


def standard_streams() -> tuple[TextIO, TextIO]:
    """Return standard output and standard error as they are now."""
    return sys.stdout, sys.stderr
