"""Simulated iteration time of a job whose activations are copied to host memory and back.

The simulator of schedules knows stages; copies begin and end between segments. So every rank's
actions are run segment by segment here, with the rules of
`merak.engine.segments.activation_offload`: a segment's activations are copied out while the next
segment computes, the segment after that waits for the copy, and they are copied back while the
segment behind runs its backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from merak.plan.balance import Timed
from merak.plan.partition import Partition
from merak.schedule.action_table import NONE, tabulate
from merak.schedule.interpreter import ActionInterpreter
from merak.schedule.ir import Action, Schedule

_Key = tuple[int, int]
"""A segment and a microbatch."""


@dataclass(frozen=True, slots=True)
class Work:
    """Computation and copies of the segments, for one microbatch.

    Args:
        partition: segments by stage.
        times: of the segments.
        recompute_s: by segment that recomputes, the seconds of it.
        offload_bytes: by offloaded segment, the bytes that are copied in each direction.
        bytes_per_s: of a rank's link to host memory, in each direction while both are used.
    """

    partition: Partition
    times: Sequence[Timed]
    recompute_s: Mapping[int, float]
    offload_bytes: Mapping[int, int]
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """Simulated times of an iteration.

    Args:
        iteration_s: from its start to the end of its last action.
        busy_s: of every rank, the time of its actions, their waits for copies included.
        starts_s: of every rank, when each of its actions begins.
    """

    iteration_s: float
    busy_s: tuple[float, ...]
    starts_s: tuple[tuple[float, ...], ...]


def estimate(schedule: Schedule, work: Work) -> Estimate:
    """Run every rank's list as early as its order, its data and its copies allow.

    Args:
        schedule: a valid schedule.
        work: of its stages.
    """
    table = tabulate(schedule)
    sources: list[int] = table.source.tolist()
    ends: list[float | None] = [None] * len(sources)
    stages = work.partition.stages
    ranks = [_Rank(work, stages, own) for own in schedule.actions]
    places = list(table.starts[:-1])
    waiting: dict[int, int] = {}
    runnable = list(range(len(ranks)))
    while runnable:
        rank = runnable.pop()
        first, stop = table.starts[rank], table.starts[rank + 1]
        while places[rank] < stop:
            place = places[rank]
            ready = 0.0 if sources[place] == NONE else ends[sources[place]]
            if ready is None:
                waiting[sources[place]] = rank
                break
            ends[place] = ranks[rank].run(schedule.actions[rank][place - first], ready)
            places[rank] += 1
            if place in waiting:
                runnable.append(waiting.pop(place))
    assert all(end is not None for end in ends), "a valid schedule ends"
    return Estimate(
        max(rank.now for rank in ranks),
        tuple(rank.busy_s for rank in ranks),
        tuple(tuple(rank.starts_s) for rank in ranks),
    )


class _Rank(ActionInterpreter):
    """Clock of one rank, and the state of its copies to host memory and back."""

    def __init__(self, work: Work, stages: Sequence[range], actions: Sequence[Action]) -> None:
        super().__init__(actions)
        self.work = work
        self.stages = stages
        self.now = 0.0
        self.busy_s = 0.0
        self.starts_s: list[float] = []
        self._out_free = self._back_free = 0.0
        self._next: _Key | None = None
        self._leaving: _Key | None = None
        # When copies to the host, and those back, are complete.
        self._left: dict[_Key, float] = {}
        self._came: dict[_Key, float] = {}
        self._done: set[_Key] = set()

    def run(self, action: Action, ready: float) -> float:
        """Run an action whose input is ready at some time; returns the time at which it ends."""
        self.prefetch_following(action)
        start = self.now = max(self.now, ready)
        self.starts_s.append(start)
        self._by_kind[action.kind](self, action)
        self.busy_s += self.now - start
        return self.now

    def prefetch(self, action: Action) -> None:
        """Begin to copy back the last segment of a stage."""
        self._begin_fetch(self.stages[action.stage][-1], action)

    def forward(self, action: Action) -> None:
        """Run the segments of a stage forward."""
        for segment in self.stages[action.stage]:
            self.now += self.work.times[segment].forward_s
            if segment in self.work.offload_bytes:
                self._next = (segment, action.microbatch)
            self._segment_ended()

    def recompute(self, action: Action) -> None:
        """Recompute the segments of a stage."""
        for segment in self.stages[action.stage]:
            self._recompute_segment(segment, action)

    def backward(self, action: Action) -> None:
        """Run the segments of a stage backward."""
        self._run_backward(action, 1.0)

    def input_gradient(self, action: Action) -> None:
        """Run the half of a backward that computes the gradients of inputs."""
        self._run_backward(action, 0.5)

    def weight_gradient(self, action: Action) -> None:
        """Run the other half, which computes the gradients of weights."""
        segments = self.stages[action.stage]
        self.now += 0.5 * sum(self.work.times[segment].backward_s for segment in segments)

    def _run_backward(self, action: Action, fraction: float) -> None:
        segments = self.stages[action.stage]
        self._begin_fetch(segments[-1], action)
        for segment, before in zip(reversed(segments), [*segments[-2::-1], None], strict=True):
            if before is not None:
                self._begin_fetch(before, action)
            self.now = max(self.now, self._came.pop((segment, action.microbatch), 0.0))
            self._recompute_segment(segment, action)
            self.now += fraction * self.work.times[segment].backward_s
            self._segment_ended()

    def _recompute_segment(self, segment: int, action: Action) -> None:
        seconds = self.work.recompute_s.get(segment, 0.0)
        if seconds and (segment, action.microbatch) not in self._done:
            self.now += seconds
            self._done.add((segment, action.microbatch))

    def _segment_ended(self) -> None:
        """Wait for the copy that ran beside a segment, and begin that of its own activations."""
        if self._leaving is not None:
            self.now = max(self.now, self._left[self._leaving])
        self._leaving, self._next = self._next, None
        if self._leaving is not None:
            self._out_free = max(self.now, self._out_free) + self._copy_s(self._leaving)
            self._left[self._leaving] = self._out_free

    def _begin_fetch(self, segment: int, action: Action) -> None:
        key = (segment, action.microbatch)
        if segment not in self.work.offload_bytes or key in self._came:
            return
        if key in (self._next, self._leaving):  # it is on the device still, and stays
            self._next = None if key == self._next else self._next
            self._leaving = None if key == self._leaving else self._leaving
            self._came[key] = self.now
        elif key in self._left:
            start = max(self.now, self._back_free, self._left[key])
            self._came[key] = self._back_free = start + self._copy_s(key)

    def _copy_s(self, key: _Key) -> float:
        return self.work.offload_bytes[key[0]] / self.work.bytes_per_s
