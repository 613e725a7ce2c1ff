"""Limits on open collectives, which the engine obeys and the memory model counts."""

from __future__ import annotations

MAX_OPEN_SENDS = 4
"""Sends to other stages whose buffers a rank holds; the next waits for the oldest.

Even sends that are awaited at once cannot deadlock (`merak.schedule.lower` says why). With four, no
schedule is slower than without a limit, when its steps are simulated with random durations.
"""

MAX_OPEN_BUCKETS = 2
"""Open reduce-scatters of gradient buckets where every microbatch reduces its gradients."""


MAX_OPEN_GATHERS = 4
"""Open all-gathers of parameter buckets where gradients are sharded and memory is scarce."""
