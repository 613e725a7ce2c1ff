"""Announcements: what rank 0 tells of a job before its first step, with the seconds that it took.

They go through this module's logger, at INFO. `MerakTrainer` and `merak train` show them on
standard error; with `merak.parallelize`, the script decides by how it sets up logging.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from merak.core.rank0 import is_rank0

logger = logging.getLogger(__name__)


class _Shown(logging.Handler):
    """Writes Merak's lines to standard error, unless the script has handlers of its own by then."""

    announced = logging.NOTSET
    """The level of announcements that was last asked for."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        if not logging.root.handlers:
            print(f"[merak] {self.format(record)}", file=sys.stderr, flush=True)


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
    """Whether anybody sees what this rank announces."""
    return is_rank0() and logger.isEnabledFor(logging.INFO)


def announce(message: str, *values: object) -> None:
    """Tell something of the job, once: on rank 0.

    Args:
        message: as of `logging`.
        *values: likewise.
    """
    if is_announcing():
        logger.info(message, *values)


@contextmanager
def announced(work: str) -> Iterator[list[str]]:
    """Tell that some work begins, and when it has ended how long it took.

    Args:
        work: what is done, such as "tracing GPT2LMHeadModel".

    Yields:
        A list for what else there is to say at the end.
    """
    announce("%s …", work)
    start = time.perf_counter()
    details: list[str] = []
    yield details
    announce(
        "%s took %.1f s%s", work, time.perf_counter() - start, "".join(f", {d}" for d in details)
    )
