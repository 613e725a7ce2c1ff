"""Limits on open collectives, which the engine obeys and the memory model counts."""

from __future__ import annotations

MAX_OPEN_BUCKETS = 2
"""Open reduce-scatters of gradient buckets where every microbatch reduces its gradients."""


MAX_OPEN_GATHERS = 4
"""Open all-gathers of parameter buckets where gradients are sharded and memory is scarce."""
