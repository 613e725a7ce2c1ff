"""Balance: the partition of segments into stages with the shortest iteration of 1F1B.

The largest stage alone does not decide: the first forwards and the last backwards pass through
every stage, so stages differ in how often the critical path runs through them. The search starts
from the partitions whose largest stage is smallest, and shifts segments between stages as long as
the iteration gets shorter. Every partition it times yields a critical path, and every critical
path bounds the time of all other partitions from below (see `CriticalPath`), so that only
those are timed which take work off every critical path known so far.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from merak.core.errors import PlanError
from merak.plan.critical_path import CriticalPath, FloatArray, critical_path
from merak.plan.partition import Partition

IntArray = NDArray[np.int64]

_TIES = 1e-9
"""Times that differ by less than this fraction of an iteration are equal."""

_MOST_STAGES_FOR_PAIRS = 8
"""Up to here the search tries two shifts at once: 3,000 neighbours, quickly bounded."""


class Timed(Protocol):
    """Forward and backward time of a segment, for one microbatch."""

    @property
    def forward_s(self) -> float:
        """Seconds of a forward."""

    @property
    def backward_s(self) -> float:
        """Seconds of a backward without recomputation."""


@dataclass(frozen=True, slots=True)
class _Problem:
    """Input of the search; sums are over the segments before each segment."""

    forward_sums: FloatArray
    backward_sums: FloatArray
    num_stages: int
    num_microbatches: int
    transfer_s: float

    @property
    def num_segments(self) -> int:
        return len(self.forward_sums) - 1


@dataclass(frozen=True, slots=True, order=True)
class _Candidate:
    """A partition and its costs; less is better, the first field first."""

    time_ticks: float
    memory_ticks: float
    cuts: tuple[int, ...]


def balance(
    costs: Sequence[Timed],
    num_stages: int,
    num_microbatches: int,
    *,
    transfer_s: float = 0.0,
) -> Partition:
    """Partition segments into stages so that an iteration of 1F1B takes the least time.

    Among partitions of equal time it prefers the one with the least work in flight, which evens out
    the memory: the least sum of squares of (a stage's time × its microbatches in flight).

    Args:
        costs: times of every segment for one microbatch, estimated or measured.
        num_stages: stages of the pipeline; each gets at least one segment.
        num_microbatches: microbatches per iteration.
        transfer_s: seconds an activation or gradient travels between neighbouring stages.

    Returns:
        The partition.

    Raises:
        PlanError: more stages than segments, counts below 1, or times that are not finite
            numbers of 0 or more.

    Source: AutoPipe (CLUSTER 2022), as Merak (arXiv:2206.04959) uses it in section 4.2.
    """
    problem = _problem(costs, num_stages, num_microbatches, transfer_s)
    paths: list[CriticalPath] = []
    found = [_descend(problem, start, paths) for start in _starts(problem)]
    return Partition(len(costs), min(found).cuts)


def _problem(
    costs: Sequence[Timed],
    num_stages: int,
    num_microbatches: int,
    transfer_s: float,
) -> _Problem:
    for name, count in (("num_stages", num_stages), ("num_microbatches", num_microbatches)):
        if count < 1:
            raise PlanError(f"{name}={count} is not a count; use 1 or more.")
    if num_stages > len(costs):
        raise PlanError(
            f"{len(costs)} segments cannot fill {num_stages} stages; use at most {len(costs)}."
        )
    if not (0 <= transfer_s < math.inf):
        raise PlanError(f"transfer_s={transfer_s} is not a time; give seconds, 0 or more.")
    for index, cost in enumerate(costs):
        if not (0 <= cost.forward_s < math.inf and 0 <= cost.backward_s < math.inf):
            raise PlanError(
                f"Segment {index} takes {cost.forward_s} s forward and {cost.backward_s} s "
                "backward; times are finite and 0 or more."
            )
    forward = np.array([cost.forward_s for cost in costs], dtype=np.float64)
    backward = np.array([cost.backward_s for cost in costs], dtype=np.float64)
    return _Problem(
        _sums(forward),
        _sums(backward),
        num_stages,
        num_microbatches,
        transfer_s,
    )


def _sums(values: FloatArray) -> FloatArray:
    return np.concatenate(([0.0], np.cumsum(values)))


def _starts(problem: _Problem) -> Iterable[IntArray]:
    """The cuts with the smallest largest stage: as early as possible, and as late as possible."""
    sums = problem.forward_sums + problem.backward_sums
    yield min_max_cuts(sums, problem.num_stages)
    from_the_end = min_max_cuts(sums[-1] - sums[::-1], problem.num_stages)
    yield problem.num_segments - from_the_end[::-1]


def min_max_cuts(sums: FloatArray, num_stages: int) -> IntArray:
    """Cuts of the partition whose largest stage is smallest; early stages hold few segments.

    Args:
        sums: time of the segments before each segment, and of all of them, (segments + 1,).
        num_stages: stages of the pipeline.
    """
    # Dynamic programming over the number of stages that hold the first segments.
    num_segments = len(sums) - 1
    largest = sums.copy()
    largest[0] = math.inf
    earlier = np.zeros((num_stages, num_segments + 1), dtype=np.int64)
    for stage in range(1, num_stages):
        so_far, largest = largest, np.full(num_segments + 1, math.inf)
        for end in range(stage + 1, num_segments + 1):
            choices = np.maximum(so_far[stage:end], sums[end] - sums[stage:end])
            best = int(np.argmin(choices))
            largest[end], earlier[stage, end] = choices[best], stage + best
    cuts = np.full(num_stages, num_segments, dtype=np.int64)
    for stage in range(num_stages - 1, 0, -1):
        cuts[stage - 1] = earlier[stage, cuts[stage]]
    return cuts[:-1]


def _descend(problem: _Problem, start: IntArray, paths: list[CriticalPath]) -> _Candidate:
    """Shift segments as long as that makes the iteration shorter, or as short and lighter.

    Args:
        problem: what to lay out.
        start: the cuts to start from.
        paths: critical paths known so far; those found here are added.
    """
    paths.append(_time(problem, start))
    tick_s = paths[0].iteration_s * _TIES or 1.0
    memory = float(_memory_ticks(problem, start[None], tick_s)[0])
    here = _Candidate(round(paths[-1].iteration_s / tick_s), memory, tuple(start.tolist()))
    shifts = _shifts(problem.num_stages)
    while True:
        better = _better_neighbour(problem, here, shifts, paths)
        if better is None:
            return here
        here = better


def _better_neighbour(
    problem: _Problem, here: _Candidate, shifts: IntArray, paths: list[CriticalPath]
) -> _Candidate | None:
    """The first neighbour better than `here`, most promising first; None when there is none."""
    tick_s = paths[0].iteration_s * _TIES or 1.0
    cuts = np.array(here.cuts, dtype=np.int64) + shifts
    cuts = cuts[(np.diff(cuts, axis=1, prepend=0, append=problem.num_segments) > 0).all(axis=1)]
    if not len(cuts):
        return None
    forward, backward = _stage_sums(problem, cuts)
    memory = _memory_ticks(problem, cuts, tick_s)
    bound_s = _bound(paths, forward, backward)
    while True:
        ticks = np.rint(bound_s / tick_s)
        first = int(np.lexsort((memory, ticks))[0])
        if (ticks[first], memory[first]) >= (here.time_ticks, here.memory_ticks):
            return None
        paths.append(_time(problem, cuts[first]))
        ticks_first = round(paths[-1].iteration_s / tick_s)
        if (ticks_first, memory[first]) < (here.time_ticks, here.memory_ticks):
            return _Candidate(ticks_first, float(memory[first]), tuple(cuts[first].tolist()))
        bound_s = np.maximum(bound_s, _bound(paths[-1:], forward, backward))
        bound_s[first] = math.inf


def _bound(paths: Sequence[CriticalPath], forward: FloatArray, backward: FloatArray) -> FloatArray:
    """The longest that any of the paths is, for every row of stage times."""
    lengths = forward @ np.array([path.forwards for path in paths]).T
    lengths += backward @ np.array([path.backwards for path in paths]).T
    lengths += np.array([path.transfers_s for path in paths])
    longest: FloatArray = lengths.max(axis=1)
    return longest


def _shifts(num_stages: int) -> IntArray:
    """Changes of the cuts: one segment moved from any stage to any other.

    Moving it from stage i to stage j moves all cuts between the two by one. With few stages, also
    any two of these at once.
    """
    rows = [
        [sign if low <= cut <= high else 0 for cut in range(num_stages - 1)]
        for low in range(num_stages - 1)
        for high in range(low, num_stages - 1)
        for sign in (-1, 1)
    ]
    shifts = np.array(rows, dtype=np.int64).reshape(len(rows), num_stages - 1)
    if num_stages > _MOST_STAGES_FOR_PAIRS or not rows:
        return shifts
    pairs = (shifts[:, None] + shifts[None]).reshape(-1, num_stages - 1)
    return np.unique(np.concatenate((shifts, pairs)), axis=0)


def _time(problem: _Problem, cuts: IntArray) -> CriticalPath:
    forward, backward = _stage_sums(problem, cuts[None])
    return critical_path(forward[0], backward[0], problem.num_microbatches, problem.transfer_s)


def _stage_sums(problem: _Problem, cuts: IntArray) -> tuple[FloatArray, FloatArray]:
    """Forward and backward time of every stage, (partitions, stages), from (partitions, cuts)."""
    ends = np.pad(cuts, ((0, 0), (1, 1)), constant_values=((0, 0), (0, problem.num_segments)))
    return (
        np.diff(problem.forward_sums[ends], axis=1),
        np.diff(problem.backward_sums[ends], axis=1),
    )


def _memory_ticks(problem: _Problem, cuts: IntArray, tick_s: float) -> FloatArray:
    """Work in flight: the norm over stages of time × microbatches in flight."""
    in_flight = np.minimum(np.arange(problem.num_stages, 0, -1), problem.num_microbatches)
    forward, backward = _stage_sums(problem, cuts)
    in_flight_s = (forward + backward) * in_flight
    ticks: FloatArray = np.rint(np.sqrt((in_flight_s**2).sum(axis=1)) / tick_s)
    return ticks
