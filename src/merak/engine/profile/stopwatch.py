"""Measuring of seconds: rounds of a call, alone or on several ranks together."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

ROUNDS = 5
"""Rounds of a measurement, of which the median counts."""

_MOST_CALLS = 50

Given = TypeVar("Given")


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """Measures calls on one device.

    Args:
        device: that computes.
        round_s: seconds that a round of calls should take.
    """

    device: torch.device
    round_s: float = 0.02

    def seconds(self, work: Callable[[], object]) -> float:
        """Seconds of one call on this rank: the median of some rounds."""
        work()
        calls = self._calls(self._round(work, 1))
        return statistics.median(self._round(work, calls) for _ in range(ROUNDS))

    def together(self, work: Callable[[], object], group: dist.ProcessGroup) -> float:
        """Seconds of one call that all ranks of a group make; the slowest rank's.

        Args:
            work: that the ranks do together; nothing on a rank that only waits.
            group: all ranks that take part.
        """
        work()
        calls = self._calls(self._slowest(self._round(work, 1, group), group))
        found = [self._round(work, calls, group) for _ in range(ROUNDS)]
        return self._slowest(statistics.median(found), group)

    def after(self, before: Callable[[], Given], work: Callable[[Given], object]) -> float:
        """Seconds of one call that needs a preparation: the median of some rounds.

        Args:
            before: prepares a call; its time does not count.
            work: takes what was prepared.
        """
        work(before())
        budget_s, found = ROUNDS * self.round_s, list[float]()
        while len(found) < ROUNDS or (sum(found) < budget_s and len(found) < _MOST_CALLS):
            given = before()
            self.finish()
            start = time.perf_counter()
            work(given)
            self.finish()
            found.append(time.perf_counter() - start)
        return statistics.median(found)

    def _calls(self, seconds: float) -> int:
        return max(1, min(1000, math.ceil(self.round_s / max(seconds, 1e-7))))

    def _round(
        self, work: Callable[[], object], calls: int, group: dist.ProcessGroup | None = None
    ) -> float:
        """Seconds of a call in a round; ranks of a job begin it together."""
        self.finish()
        if group is not None:
            dist.barrier(group=group)
        start = time.perf_counter()
        for _ in range(calls):
            work()
        self.finish()
        return (time.perf_counter() - start) / calls

    def finish(self) -> None:
        """Wait until the device has done its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _slowest(self, seconds: float, group: dist.ProcessGroup) -> float:
        on = self.device if dist.get_backend(group) == "nccl" else torch.device("cpu")
        own = torch.tensor(seconds, dtype=torch.float64, device=on)
        dist.all_reduce(own, dist.ReduceOp.MAX, group=group)
        return float(own)
