"""Waiting with an end: torch's own timeouts, and a condition that is asked again and again."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist


def until(holds: Callable[[], bool], limit_s: float) -> bool:
    """Whether something comes to hold within a time."""
    deadline = time.perf_counter() + limit_s
    while time.perf_counter() < deadline:
        if holds():
            return True
        time.sleep(0.05)
    return holds()


def extend_timeouts(limit_s: float, known: int) -> int:
    """Let torch's own timeouts be no shorter than this.

    Args:
        limit_s: what no process group's timeout is to be shorter than.
        known: groups that were seen to before.

    Returns:
        The number of groups there are.
    """
    groups = list(dist.distributed_c10d._world.pg_map)
    if len(groups) == known:
        return known
    wanted = timedelta(seconds=limit_s)
    for group in groups:
        backends = [group._get_backend(device) for device in group._device_types]
        if any(backend.options._timeout < wanted for backend in backends):
            dist.distributed_c10d._set_pg_timeout(wanted, group)
    return len(groups)
