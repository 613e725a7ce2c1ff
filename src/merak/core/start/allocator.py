"""Freed memory of the host that a CPU job keeps for its next step.

glibc gives large blocks back to the system when they are freed, which zeroes them anew when they
are asked for: each step of a job touches the same pages for the first time. With higher thresholds
a process keeps them.
"""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3)."""

_KEPT_BYTES = 1 << 30
"""Of free memory at the end of the heap; more is given back."""

_LARGEST_BYTES = 32 << 20
"""Of a block that comes from the heap, the most that glibc allows; larger ones are given back."""

_OF_GLIBC = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Variables of the environment that set the same; where one is set, nothing is changed."""


def keep_freed_memory() -> bool:
    """Keep freed memory for what is allocated next; returns whether the C library does."""
    if any(name in os.environ for name in _OF_GLIBC):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # not glibc
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_BYTES) and mallopt(_TRIM_THRESHOLD, _KEPT_BYTES))
