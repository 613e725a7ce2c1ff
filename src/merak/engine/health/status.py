"""The status of this rank's engine: its action, what it waits for, and a record of past steps.

The engine updates it with a few assignments per action; the watchdog's thread reads it
(`merak.engine.health.watchdog`), and so does the timeline (`merak.engine.health.step_records`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock
from typing import NamedTuple

import torch

from merak.core.health.status import Wait, end_step
from merak.engine.health.step_records import Clock, Mark, StepRecords
from merak.schedule.ir import Action, Kind, Schedule

_KINDS = {
    Kind.FORWARD: "forward",
    Kind.RECOMPUTE: "recompute",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRADIENT: "input gradient",
    Kind.WEIGHT_GRADIENT: "weight gradient",
}
"""Names of actions in a profiler's trace, before the number of the microbatch."""

_MOST_BEHIND = 4096
"""The most marks of a device that are waiting for it to pass them."""


class RankStatus(NamedTuple):
    """The status of a rank, and since when on `time.perf_counter`'s clock.

    A phase is a training step or a microbatch of an evaluation; empty between them, where the time
    is the user's unless the rank waits.
    """

    phase: str
    action: Action | None
    wait: Wait | None
    since_s: float

    @property
    def is_busy(self) -> bool:
        """Whether the engine runs or waits for other ranks."""
        return bool(self.phase) or self.wait is not None


class Progress:
    """The progress of one rank's engine, which reports every action and wait to it.

    Args:
        clock: of the device that the engine computes on.
        num_kept: past steps that stay recorded; 0 records nothing.
    """

    def __init__(self, clock: Clock, num_kept: int) -> None:
        self.records = StepRecords(clock, num_kept)
        self.status = RankStatus("", None, None, time.perf_counter())
        # Statuses that the host has left and a device that runs behind it may not have: oldest
        # first.
        self.behind: deque[tuple[RankStatus, Mark]] = deque(maxlen=_MOST_BEHIND)
        self._asking = Lock()  # of the watchdog's threads
        self._clock = clock
        self._start: Mark = 0.0

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """A context for one training step."""
        self.records.open(number)
        with self._phase(f"step {number}"), _profiled(f"step {number + 1}"):
            yield
        self.records.close()
        end_step()

    def follow_schedule(self, schedule: Schedule) -> None:
        """Record the schedule of the step that runs."""
        self.records.follow(schedule)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """A context for an evaluation."""
        with self._phase("an evaluation"):
            yield
        end_step()

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        """A context for an action; it is recorded, from `inputs_ready` on if that is called."""
        before = self.status
        self.status = RankStatus(before.phase, action, None, time.perf_counter())
        self._start = self._clock.mark()
        name = f"{_KINDS[action.kind]} {action.microbatch}, stage {action.stage}"
        try:
            with _profiled(name):
                yield
            end = self._leave()
            self.records.add(action, self._start, end)
        finally:
            self.status = before._replace(since_s=time.perf_counter())

    def inputs_ready(self) -> None:
        """The running action has all of its inputs, and is timed from now on."""
        self._start = self._clock.mark()

    @contextmanager
    def waiting(self, what: str, peers: tuple[int, ...]) -> Iterator[None]:
        """A context for a wait for other ranks.

        Args:
            what: the thing it waits for, ending in a preposition that "rank 3" can follow.
            peers: global ranks that it waits for.
        """
        before = self.status
        now = time.perf_counter()
        self.status = RankStatus(before.phase, before.action, Wait(what, peers), now)
        try:
            with _profiled(f"wait for {what}", *peers):
                yield
            if self._clock.runs_behind:
                self._leave()
        finally:
            self.status = before._replace(since_s=time.perf_counter())

    @contextmanager
    def _phase(self, phase: str) -> Iterator[None]:
        self.status = RankStatus(phase, None, None, time.perf_counter())
        try:
            yield
        finally:
            self.status = RankStatus("", None, None, time.perf_counter())

    def _leave(self) -> Mark:
        mark = self._clock.mark()
        if self._clock.runs_behind:
            self.behind.append((self.status, mark))
        return mark

    def device_status(self) -> RankStatus | None:
        """The oldest status that a device running behind the host is still in; None if none."""
        with self._asking:
            while self.behind:
                status, mark = self.behind[0]
                if not self._clock.is_past(mark):
                    return status
                self.behind.popleft()
            return None


def _profiled(name: str, *ranks: int) -> AbstractContextManager[object]:
    """A named range in the trace of a profiler, if one runs.

    Args:
        name: of the range.
        ranks: that follow it.
    """
    if not torch._C._autograd._profiler_enabled():
        return nullcontext()
    whole = f"{name} rank {', '.join(map(str, ranks))}" if ranks else name
    return torch.profiler.record_function(whole)
