"""Balance: the partition of segments into stages with the shortest iteration of 1F1B.

The largest stage alone does not decide: the first forwards and the last backwards pass through
every stage, so stages differ in how often the critical path runs through them. The search starts
from the partitions whose largest stage is smallest, and shifts segments between stages as long as
the iteration gets shorter. Every partition it times yields a critical path, and every critical
path bounds the time of all other partitions from below (see `CriticalPath`), so that only
those are timed which take work off every critical path known so far. Where there are few
partitions, all of them are bounded or timed, so that the result is the best of all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from merak.core.errors import PlanError
from merak.plan.critical_path import CriticalPath, FloatArray, critical_path
from merak.plan.partition import Partition
from merak.schedule.costs import Link

IntArray = NDArray[np.int64]

_TIES = 1e-9
"""Times that differ by less than this fraction of an iteration are equal."""

_MOST_STAGES_FOR_PAIRS = 8
"""Up to here the search tries two shifts at once: 3,000 neighbours, quickly bounded."""


LISTED = 20_000
"""Up to this many partitions the search considers all of them, and its result is the best."""


class Timed(Protocol):
    """Forward and backward time of a segment, for one microbatch."""

    @property
    def forward_s(self) -> float:
        """Seconds of one microbatch's forward."""

    @property
    def backward_s(self) -> float:
        """Seconds of a backward without recomputation."""


@dataclass(frozen=True, slots=True)
class _Problem:
    """Input of the search.

    Args:
        forward_sums: forward time of the segments before each segment, and of all of them,
            one row per stage or one for all of them, (stages or 1, segments + 1).
        backward_sums: of the backward, likewise.
        num_stages: stages of the pipeline.
        num_microbatches: microbatches per iteration.
        latency_s: of the link between each stage and the next, (stages - 1,).
        occupancy_s: of that link by what travels where a stage begins with each segment,
            (stages - 1, segments); None for no time.
        listed: up to how many partitions all are considered.
    """

    forward_sums: FloatArray
    backward_sums: FloatArray
    num_stages: int
    num_microbatches: int
    latency_s: FloatArray
    occupancy_s: FloatArray | None
    listed: int

    @property
    def num_segments(self) -> int:
        return int(self.forward_sums.shape[1]) - 1


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
    listed: int = LISTED,
) -> Partition:
    """Partition segments into equal stages so that an iteration of 1F1B takes the least time.

    Among partitions of equal time it prefers the one with the least work in flight, which evens out
    the memory: the least sum of squares of (a stage's time × its microbatches in flight).

    Args:
        costs: times of every segment for one microbatch, estimated or measured.
        num_stages: stages of the pipeline; each gets at least one segment.
        num_microbatches: microbatches per iteration.
        transfer_s: seconds an activation or gradient travels between neighbouring stages.
        listed: up to this many partitions all are considered, so that the result is the best.

    Returns:
        The partition.

    Raises:
        PlanError: more stages than segments, counts below 1, or times that are not finite
            numbers of 0 or more.

    Source: AutoPipe (CLUSTER 2022), as Merak (arXiv:2206.04959) uses it in section 4.2.
    """
    _check_counts(len(costs), num_stages, num_microbatches)
    if not (0 <= transfer_s < math.inf):
        raise PlanError(f"transfer_s={transfer_s} is not a time; give seconds, 0 or more.")
    latency_s = np.full(num_stages - 1, transfer_s)
    sums = _time_sums([costs])
    return _best(_Problem(*sums, num_stages, num_microbatches, latency_s, None, listed))


def balance_uneven(
    costs: Sequence[Sequence[Timed]],
    num_microbatches: int,
    *,
    links: Sequence[Link] = (),
    cut_bytes: Sequence[float] = (),
    listed: int = LISTED,
) -> Partition:
    """Like `balance`, for stages on unequal devices with unequal links between them.

    Args:
        costs: times of every segment on the device of every stage, for one microbatch: one
            sequence per stage, all of the same segments.
        num_microbatches: microbatches per iteration.
        links: between each stage and the next; none for transfers that take no time.
        cut_bytes: what one microbatch sends over a boundary before segments 1, 2, …; none for
            nothing.
        listed: up to this many partitions all are considered, so that the result is the best.

    Raises:
        PlanError: more stages than segments, stages with times of different segments, a wrong
            number of links or cuts, or times and sizes that are not finite numbers of 0 or more.
    """
    lengths = {len(own) for own in costs}
    if len(lengths) > 1:
        raise PlanError(
            f"The stages have times of {sorted(lengths)} segments; give every stage's device "
            "times of all segments."
        )
    num_stages, num_segments = len(costs), max(lengths, default=0)
    _check_counts(num_segments, num_stages, num_microbatches)
    for name, given, wanted in (
        ("links", links, num_stages - 1),
        ("cut_bytes", cut_bytes, num_segments - 1),
    ):
        if given and len(given) != wanted:
            raise PlanError(
                f"{name} has {len(given)} values; {num_stages} stages of {num_segments} segments "
                f"need {wanted}."
            )
    sums = _time_sums(costs)
    transfers = _transfers(links or [Link()] * (num_stages - 1), cut_bytes)
    return _best(_Problem(*sums, num_stages, num_microbatches, *transfers, listed))


def _check_counts(num_segments: int, num_stages: int, num_microbatches: int) -> None:
    for name, count in (("num_stages", num_stages), ("num_microbatches", num_microbatches)):
        if count < 1:
            raise PlanError(f"{name}={count} is not a count; use 1 or more.")
    if num_stages > num_segments:
        raise PlanError(
            f"{num_segments} segments cannot fill {num_stages} stages; use at most {num_segments}."
        )


def _time_sums(costs: Sequence[Sequence[Timed]]) -> tuple[FloatArray, FloatArray]:
    """Forward and backward time of the segments before each segment, and of all of them."""
    for own in costs:
        for index, cost in enumerate(own):
            if not (0 <= cost.forward_s < math.inf and 0 <= cost.backward_s < math.inf):
                raise PlanError(
                    f"Segment {index} takes {cost.forward_s} s forward and {cost.backward_s} s "
                    "backward; times are finite and 0 or more."
                )
    forward = np.array([[0.0, *(cost.forward_s for cost in own)] for own in costs])
    backward = np.array([[0.0, *(cost.backward_s for cost in own)] for own in costs])
    return np.cumsum(forward, axis=1), np.cumsum(backward, axis=1)


def _transfers(
    links: Sequence[Link], cut_bytes: Sequence[float]
) -> tuple[FloatArray, FloatArray | None]:
    """Latency of each boundary, and its link's occupancy by what travels at each cut."""
    for link in links:
        if not (0 <= link.latency_s < math.inf and link.bandwidth_bytes_per_s > 0):
            raise PlanError(f"{link} is no link; latency is 0 or more, bandwidth above 0.")
    for index, size in enumerate(cut_bytes):
        if not (0 <= size < math.inf):
            raise PlanError(f"cut_bytes[{index}] is {size}; sizes are finite and 0 or more.")
    latency_s = np.array([link.latency_s for link in links])
    bandwidth = np.array([[link.bandwidth_bytes_per_s] for link in links])
    occupancy_s = np.array([0.0, *cut_bytes]) / bandwidth if links and cut_bytes else None
    return latency_s, None if occupancy_s is None or not occupancy_s.any() else occupancy_s


def _best(problem: _Problem) -> Partition:
    paths: list[CriticalPath] = []
    found = min(_descend(problem, start, paths) for start in _starts(problem))
    if math.comb(problem.num_segments - 1, problem.num_stages - 1) <= problem.listed:
        every = np.array(
            list(combinations(range(1, problem.num_segments), problem.num_stages - 1)),
            dtype=np.int64,
        )
        better: _Candidate | None = found
        while better is not None:
            found, better = better, _better(problem, better, every, paths)
    return Partition(problem.num_segments, found.cuts)


def _starts(problem: _Problem) -> Iterable[IntArray]:
    """The cuts with the smallest largest stage: as early as possible, and as late as possible."""
    sums = problem.forward_sums + problem.backward_sums
    yield min_max_cuts(sums, problem.num_stages)
    from_the_end = min_max_cuts((sums[:, -1:] - sums[:, ::-1])[::-1], problem.num_stages)
    yield problem.num_segments - from_the_end[::-1]


def min_max_cuts(sums: FloatArray, num_stages: int) -> IntArray:
    """Cuts of the partition whose largest stage is smallest; early stages hold few segments.

    Args:
        sums: time of the segments before each segment, and of all of them, (segments + 1,), or
            one such row per stage.
        num_stages: stages of the pipeline.
    """
    # Dynamic programming over the number of stages that hold the first segments.
    num_segments = sums.shape[-1] - 1
    rows = np.broadcast_to(sums, (num_stages, num_segments + 1))
    largest = rows[0].copy()
    largest[0] = math.inf
    earlier = np.zeros((num_stages, num_segments + 1), dtype=np.int64)
    for stage in range(1, num_stages):
        own = rows[stage]
        so_far, largest = largest, np.full(num_segments + 1, math.inf)
        for end in range(stage + 1, num_segments + 1):
            choices = np.maximum(so_far[stage:end], own[end] - own[stage:end])
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
        cuts = np.array(here.cuts, dtype=np.int64) + shifts
        filled = np.diff(cuts, axis=1, prepend=0, append=problem.num_segments) > 0
        better = _better(problem, here, cuts[filled.all(axis=1)], paths)
        if better is None:
            return here
        here = better


def _better(
    problem: _Problem, here: _Candidate, cuts: IntArray, paths: list[CriticalPath]
) -> _Candidate | None:
    """The first of some partitions better than `here`, most promising first; None if there is none.

    Args:
        problem: what to lay out.
        here: the partition to beat.
        cuts: the others, (partitions, stages - 1).
        paths: critical paths known so far; those found here are added.
    """
    if not len(cuts):
        return None
    tick_s = paths[0].iteration_s * _TIES or 1.0
    stages = _stages(problem, cuts)
    memory = _memory_ticks(problem, cuts, tick_s)
    bound_s = _bound(paths, stages)
    while True:
        ticks = np.rint(bound_s / tick_s)
        least = np.flatnonzero(ticks == ticks.min())
        first = int(least[np.argmin(memory[least])])
        if (ticks[first], memory[first]) >= (here.time_ticks, here.memory_ticks):
            return None
        paths.append(_time(problem, cuts[first]))
        ticks_first = round(paths[-1].iteration_s / tick_s)
        if (ticks_first, memory[first]) < (here.time_ticks, here.memory_ticks):
            return _Candidate(ticks_first, float(memory[first]), tuple(cuts[first].tolist()))
        bound_s = np.maximum(bound_s, _bound(paths[-1:], stages))
        bound_s[first] = math.inf


@dataclass(frozen=True, slots=True)
class _Stages:
    """Times of every stage of some partitions; a row per partition.

    Args:
        forward_s: forward of one microbatch, (partitions, stages).
        backward_s: backward of one microbatch, (partitions, stages).
        occupancy_s: of the link after each stage by one transfer, (partitions, stages - 1), or
            None.
    """

    forward_s: FloatArray
    backward_s: FloatArray
    occupancy_s: FloatArray | None


def _bound(paths: Sequence[CriticalPath], stages: _Stages) -> FloatArray:
    """The longest that any of the paths is, for every partition."""
    lengths = stages.forward_s @ np.array([path.forwards for path in paths]).T
    lengths += stages.backward_s @ np.array([path.backwards for path in paths]).T
    lengths += np.array([path.transfers_s for path in paths])
    if stages.occupancy_s is not None:
        lengths += stages.occupancy_s @ np.array([path.occupancies for path in paths]).T
    longest: FloatArray = lengths.max(axis=1)
    return longest


@cache
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
    stages = _stages(problem, cuts[None])
    return critical_path(
        stages.forward_s[0],
        stages.backward_s[0],
        problem.num_microbatches,
        problem.latency_s,
        None if stages.occupancy_s is None else stages.occupancy_s[0],
    )


def _stages(problem: _Problem, cuts: IntArray) -> _Stages:
    """Times of every stage, from (partitions, cuts)."""
    ends = np.pad(cuts, ((0, 0), (1, 1)), constant_values=((0, 0), (0, problem.num_segments)))
    occupancy_s = problem.occupancy_s
    return _Stages(
        _between(problem.forward_sums, ends),
        _between(problem.backward_sums, ends),
        None if occupancy_s is None else occupancy_s[np.arange(problem.num_stages - 1), cuts],
    )


def _between(sums: FloatArray, ends: IntArray) -> FloatArray:
    if len(sums) == 1:
        return np.diff(sums[0][ends], axis=1)
    rows = np.arange(len(sums))
    between: FloatArray = sums[rows, ends[:, 1:]] - sums[rows, ends[:, :-1]]
    return between


def _memory_ticks(problem: _Problem, cuts: IntArray, tick_s: float) -> FloatArray:
    """Work in flight: the norm over stages of time × microbatches in flight."""
    in_flight = np.minimum(np.arange(problem.num_stages, 0, -1), problem.num_microbatches)
    stages = _stages(problem, cuts)
    in_flight_s = (stages.forward_s + stages.backward_s) * in_flight
    ticks: FloatArray = np.rint(np.sqrt((in_flight_s**2).sum(axis=1)) / tick_s)
    return ticks
