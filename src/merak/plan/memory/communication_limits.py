"""Limits on communication under way, which the engine keeps to and the memory model counts."""

from __future__ import annotations

MAX_OPEN_BUCKETS = 2
"""Buckets under way at a time where they are summed after every microbatch to save memory."""


MAX_OPEN_GATHERS = 4
"""Buckets under way at a time where gradients are shared, so that their memory is scarce."""
