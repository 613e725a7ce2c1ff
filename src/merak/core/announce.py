"""Announcements of rank 0 about a job before its first step, with the seconds of each phase.

They go through this module's logger, at INFO. `MerakTrainer` and `merak train` show them on
standard error; with `merak.parallelize`, the script decides by how it sets up logging.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from merak.core.health.stderr import write_line
from merak.core.rank0 import is_rank0

logger = logging.getLogger(__name__)


class _Shown(logging.Handler):
    """Handler that writes Merak's lines to standard error, where the script has no handlers."""

    announced = logging.NOTSET
    """Level of announcements that was last requested."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        if not logging.root.handlers:
            write_line(f"[merak] {self.format(record)}")


_shown = _Shown()


def show_announcements(level: int = logging.INFO) -> None:
    """Show announcements and warnings, by the script's own handlers where it has set up logging.

    Args:
        level: the lowest announcement that is shown, unless the script has set this logger's level.
    """
    if logger.level in (logging.NOTSET, _shown.announced):
        logger.setLevel(level)
        _shown.announced = level
    if not logger.hasHandlers():
        logging.getLogger("merak").addHandler(_shown)


def is_announcing() -> bool:
    """Whether announcements of this rank are shown."""
    return is_rank0() and logger.isEnabledFor(logging.INFO)


def announce(message: str, *values: object) -> None:
    """Log an announcement about the job, on rank 0 only.

    Args:
        message: with `%s` for each of the values, as of `logging`.
        *values: for the message.
    """
    if is_announcing():
        logger.info(message, *values)


@contextmanager
def announced(work: str) -> Iterator[list[str]]:
    """Announce the start of some work, and its seconds when it has ended.

    Args:
        work: the phase, such as "tracing GPT2LMHeadModel".

    Yields:
        A list of further details for the end.
    """
    announce("%s …", work)
    start = time.perf_counter()
    details: list[str] = []
    yield details
    announce(
        "%s took %.1f s%s", work, time.perf_counter() - start, "".join(f", {d}" for d in details)
    )
