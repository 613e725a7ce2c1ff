"""Step records: the start and end of every action of the last steps, on all ranks of a pipeline.

An action starts when it has received its inputs. On a GPU, where the host runs ahead,
events in the stream take the place of the host's clock, and are read only when the trace is.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from merak.core.mesh import Mesh
from merak.schedule.ir import Action, Schedule

Mark = Any
"""A timestamp of a clock: seconds, or an event of a GPU."""

Record = tuple[Action, float, float]
"""An action, its start and its end, s."""

_NUM_ROUND_TRIPS = 12


class Clock(Protocol):
    """A clock whose marks are cheap to take and read later."""

    runs_behind: bool
    """Whether the device reaches a mark later than the host takes it."""

    def mark(self) -> Mark:
        """A mark of this moment."""

    def is_past(self, mark: Mark) -> bool:
        """Whether the device has reached a mark."""

    def seconds(self, marks: Sequence[Mark]) -> list[float]:
        """The marks on `time.perf_counter`'s clock, s; waits until all have been reached."""


class HostClock:
    """The clock of a CPU, whose operators run as they are called."""

    runs_behind = False

    def mark(self) -> Mark:
        """Record the current time of the host's clock, s."""
        return time.perf_counter()

    def is_past(self, mark: Mark) -> bool:
        """True: a CPU does not run behind."""
        return True

    def seconds(self, marks: Sequence[Mark]) -> list[float]:
        """Times of all recorded marks, s."""
        return list(marks)


class DeviceClock:
    """The clock of a GPU: an event in its current stream.

    Args:
        device: the GPU.
    """

    runs_behind = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Mark:
        """An event in the current stream, behind all that has been started so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def is_past(self, mark: Mark) -> bool:
        """Whether the GPU has reached an event."""
        # A watching thread asks, whose own device would else be made ready: the first, not this.
        with torch.cuda.device(self._device):
            return bool(mark.query())

    def seconds(self, marks: Sequence[Mark]) -> list[float]:
        """The events on the host's clock: synchronise, and count back from now."""
        torch.cuda.synchronize(self._device)
        anchor = self.mark()
        anchor.synchronize()
        now = time.perf_counter()
        return [now - mark.elapsed_time(anchor) / 1e3 for mark in marks]


def clock_of(device: torch.device) -> Clock:
    """The clock for a device."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()


@dataclass(slots=True)
class _Step:
    """One step of this rank, in marks."""

    number: int
    begin: Mark
    schedule: Schedule | None
    actions: list[tuple[Action, Mark, Mark]]
    end: Mark = None
    updates: list[tuple[Mark, Mark]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A measured step of a pipeline, for `schedule.simulator.timeline.measured_timeline`.

    Args:
        step: the job's step number.
        schedule: what was run.
        records: per pp rank, its actions in order with start and end, s, on one clock.
        spans: per pp rank, when it began the step and when it had reduced its gradients, s.
    """

    step: int
    schedule: Schedule
    records: tuple[tuple[Record, ...], ...]
    spans: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class OwnStep:
    """A measured step of one rank, on its host's clock.

    Args:
        step: the job's step number.
        schedule: what was run.
        records: its actions in order with start and end, s.
        span: when it began the step and when it had reduced its gradients, s.
        update_s: seconds of its optimizer's step, without what ranks exchange for it.
    """

    step: int
    schedule: Schedule
    records: tuple[Record, ...]
    span: tuple[float, float]
    update_s: float = 0.0

    @property
    def busy_s(self) -> float:
        """Seconds of all actions together."""
        return sum(end - start for _, start, end in self.records)

    @property
    def pipeline_s(self) -> float:
        """Seconds from the step's beginning to the end of the last action."""
        return max((end for _, _, end in self.records), default=self.span[0]) - self.span[0]

    def earlier(self, seconds: float) -> OwnStep:
        """The step on a clock that is behind by so many seconds."""
        moved = tuple((action, s - seconds, e - seconds) for action, s, e in self.records)
        begin, end = self.span
        return replace(self, records=moved, span=(begin - seconds, end - seconds))


class StepRecords:
    """Records of the last steps of one rank's engine.

    Args:
        clock: takes the marks.
        num_kept: so many steps are kept; 0 records nothing.
    """

    def __init__(self, clock: Clock, num_kept: int) -> None:
        self._clock = clock
        self._steps: deque[_Step] = deque(maxlen=num_kept)
        self._open: _Step | None = None
        self._update: Mark = None

    def open(self, number: int) -> None:
        """Open the record of a step; an unfinished one is dropped."""
        self._open = _Step(number, self._clock.mark(), None, []) if self._steps.maxlen else None

    def follow(self, schedule: Schedule) -> None:
        """Record the schedule of the step."""
        if self._open is not None:
            self._open.schedule = schedule

    def add(self, action: Action, start: Mark, end: Mark) -> None:
        """Record an action that has run."""
        if self._open is not None:
            self._open.actions.append((action, start, end))

    def close(self) -> None:
        """Close the record of the step; without microbatches, and so a schedule, it is dropped."""
        if self._open is not None and self._open.schedule is not None:
            self._open.end = self._clock.mark()
            self._steps.append(self._open)
        self._open = None

    def begin_update(self) -> None:
        """Record the beginning of an optimizer's step."""
        self._update = self._clock.mark() if self._steps.maxlen else None

    def end_update(self) -> None:
        """Record the end of an optimizer's step, as of the training step that runs or ran last."""
        step = self._open or (self._steps[-1] if self._steps else None)
        if step is not None and self._update is not None:
            step.updates.append((self._update, self._clock.mark()))
        self._update = None

    def own(self) -> list[OwnStep]:
        """This rank's recorded steps, oldest first, on its host's clock."""
        marks = [
            mark
            for step in self._steps
            for mark in (
                step.begin,
                step.end,
                *(m for _, *both in step.actions for m in both),
                *(m for both in step.updates for m in both),
            )
        ]
        moments = iter(self._clock.seconds(marks))
        result = []
        for step in self._steps:
            assert step.schedule is not None
            span = next(moments), next(moments)
            records = tuple((action, next(moments), next(moments)) for action, _, _ in step.actions)
            update_s = sum(-next(moments) + next(moments) for _ in step.updates)
            result.append(OwnStep(step.number, step.schedule, records, span, update_s))
        return result


def gather_records(records: StepRecords, mesh: Mesh) -> tuple[StepRecord, ...]:
    """Gather the last steps of all ranks of this pipeline; its ranks call it together.

    Returns:
        Steps, oldest first, on the clock of the pipeline's first rank; the same on every rank.
    """
    behind = _offset_s(mesh)
    own = [step.earlier(behind) for step in records.own()]
    moved = [(step.records, step.span) for step in own]
    everyone: list[Any] = [moved]
    group = mesh.group("pp")
    if group is not None:
        everyone = [None] * mesh.pp
        dist.all_gather_object(everyone, moved, group=group)
    return tuple(
        StepRecord(
            step.step,
            step.schedule,
            tuple(rows[place][0] for rows in everyone),
            tuple(rows[place][1] for rows in everyone),
        )
        for place, step in enumerate(own)
    )


def _offset_s(mesh: Mesh) -> float:
    """The seconds by which this rank's clock is ahead of the pipeline's first rank's.

    A message goes there and back between hosts' memories, which no GPU delays; the first rank's
    clock is read half way. The quickest of several round trips errs by half its time at most.
    """
    group = mesh.group("pp")
    if group is None:
        return 0.0
    first, mine = mesh.rank_at(0), torch.zeros(1, dtype=torch.int64, device="cpu")
    if mesh.pp_rank == 0:
        for peer in range(1, mesh.pp):
            for _ in range(_NUM_ROUND_TRIPS):
                dist.recv(mine, mesh.rank_at(peer), group)
                mine.fill_(time.perf_counter_ns())
                dist.send(mine, mesh.rank_at(peer), group)
        return 0.0
    best: tuple[int, float] | None = None
    for _ in range(_NUM_ROUND_TRIPS):
        left = time.perf_counter_ns()
        dist.send(mine, first, group)
        dist.recv(mine, first, group)
        theirs = int(mine.item())
        back = time.perf_counter_ns()
        found = (back - left, (left + back) / 2 - theirs)
        best = found if best is None else min(best, found)
    assert best is not None
    return best[1] / 1e9
