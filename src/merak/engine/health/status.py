"""What this rank's engine does at the moment, and a record of what it did.

The engine says so as it goes, at the price of a few assignments per action: a watching thread
reads it (`merak.engine.health.watchdog`), and so does whoever wants the timeline
(`merak.engine.health.step_records`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from merak.core.health.status import Wait
from merak.engine.health.step_records import Clock, Mark, Records
from merak.schedule.ir import Action, Schedule

_MOST_BEHIND = 4096
"""Marks of a device that are kept where nobody looks whether they are passed."""


class RankStatus(NamedTuple):
    """Where a rank stands, and since when on `time.perf_counter`'s clock.

    A phase is a training step or a microbatch of an evaluation; empty between them, where the time
    is the user's unless the rank waits.
    """

    phase: str
    action: Action | None
    wait: Wait | None
    since_s: float

    @property
    def is_busy(self) -> bool:
        """Whether the engine is at work or waits here."""
        return bool(self.phase) or self.wait is not None


class Progress:
    """Told by one rank's engine of what it does.

    Args:
        clock: of the device that the engine computes on.
        num_kept: so many steps of the past are recorded; 0 records nothing.
    """

    def __init__(self, clock: Clock, num_kept: int) -> None:
        self.records = Records(clock, num_kept)
        self.status = RankStatus("", None, None, time.perf_counter())
        # What the host has left and a device that runs behind it may not have: oldest first.
        self.behind: deque[tuple[RankStatus, Mark]] = deque(maxlen=_MOST_BEHIND)
        self._clock = clock
        self._start: Mark = 0.0

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Inside is one training step."""
        self.records.open(number)
        with self._phase(f"step {number}"):
            yield
        self.records.close()

    def planned(self, schedule: Schedule) -> None:
        """The step that runs follows a schedule."""
        self.records.follow(schedule)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Inside some microbatches are evaluated."""
        with self._phase("an evaluation"):
            yield

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        """Inside an action is performed; record it, from `started` on if that is called."""
        before = self.status
        self.status = RankStatus(before.phase, action, None, time.perf_counter())
        self._start = self._clock.mark()
        try:
            yield
            end = self._leave()
            self.records.add(action, self._start, end)
        finally:
            self.status = before._replace(since_s=time.perf_counter())

    def started(self) -> None:
        """The action has all that it waited for."""
        self._start = self._clock.mark()

    @contextmanager
    def waiting(self, what: str, peers: tuple[int, ...]) -> Iterator[None]:
        """Inside the rank waits.

        Args:
            what: for what, ending in a preposition that "rank 3" can follow.
            peers: global ranks that it needs for that.
        """
        before = self.status
        now = time.perf_counter()
        self.status = RankStatus(before.phase, before.action, Wait(what, peers), now)
        try:
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
        """The first thing that a device running behind the host has not done; None if none."""
        while self.behind:
            status, mark = self.behind[0]
            if not self._clock.is_past(mark):
                return status
            self.behind.popleft()
        return None
