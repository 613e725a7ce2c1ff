"""Timeouts of torch's process groups, and polling of a condition up to a deadline."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist


def until(holds: Callable[[], bool], limit_s: float = math.inf) -> bool:
    """Poll a condition until it holds; false if it does not within the limit."""
    deadline = time.perf_counter() + limit_s
    while time.perf_counter() < deadline:
        if holds():
            return True
        time.sleep(0.05)
    return holds()


def extend_timeouts(limit_s: float, known: int) -> int:
    """Extend the timeouts of all process groups to at least a limit.

    Args:
        limit_s: least timeout of a process group.
        known: number of groups that have been extended already.

    Returns:
        The number of groups.
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
