"""Balance of stages of which a rank has several, on unequal devices.

`balance_uneven` times 1F1B with a rank for each stage. Where ranks have several stages, as in
V-shaped and interleaved schedules, what bounds a step is the work of the fullest rank, all of its
stages together: a slow device may have one long stage beside a short one. Partitions are ranked by
that work, and the schedule is simulated for the most promising of them and those beside the best.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from merak.plan.balance import LISTED, Timed
from merak.plan.critical_path import FloatArray
from merak.plan.partition import Partition
from merak.schedule.costs import Link, stage_costs
from merak.schedule.ir import Schedule
from merak.schedule.simulator.simulate import simulate

IntArray = NDArray[np.int64]

MOST_ACTIONS = 40_000
"""Actions that may be simulated to choose a partition: a fifth of a second of a core, about."""

_PROMISING = 16
"""Partitions that are simulated for the work of their fullest rank."""


class RankBalance:
    """Search for the partition with the shortest step of a schedule.

    Args:
        schedule: whose ranks may have several stages, or stages several ranks.
        costs: times of every segment on the device of every rank.
        links: between each stage and the next.
        cut_bytes: what one microbatch sends over a boundary before segments 1, 2, ….
    """

    def __init__(
        self,
        schedule: Schedule,
        costs: Sequence[Sequence[Timed]],
        links: Sequence[Link],
        cut_bytes: Sequence[float],
    ) -> None:
        self._schedule, self._links, self._cut_bytes = schedule, links, cut_bytes
        self._forward_s = _sums([[own.forward_s for own in rank] for rank in costs])
        self._backward_s = _sums([[own.backward_s for own in rank] for rank in costs])
        self._ranks = np.array(schedule.pipes[0])
        # Microbatches that pass a stage on a rank, (ranks, stages).
        self._passing = np.zeros((schedule.num_ranks, schedule.num_stages))
        for pipe in schedule.microbatch_pipes:
            self._passing[schedule.pipes[pipe], np.arange(schedule.num_stages)] += 1
        self._num_segments = len(costs[0])
        self._left = max(_PROMISING, MOST_ACTIONS // max(1, sum(map(len, schedule.actions))))
        self._known: dict[tuple[int, ...], float] = {}

    def best(self, start: Partition) -> Partition:
        """The partition with the shortest step that was found.

        Args:
            start: to begin with; it is kept where nothing is shorter.
        """
        found, first = start.cuts, self._step_s(start.cuts)
        for cuts in self._promising(start.cuts)[:_PROMISING]:
            found = min(found, tuple(map(int, cuts)), key=self._step_s)
        while self._left > 0:
            neighbors = map(tuple, self._neighbors(found).tolist())
            shorter = (own for own in neighbors if self._is_shorter(own, found))
            better = next(shorter, None)
            if better is None:
                break
            found = better
        shortest = self._step_s(found) < first * (1 - 1e-9)
        return Partition(self._num_segments, found) if shortest else start

    def _promising(self, start: tuple[int, ...]) -> IntArray:
        """Partitions by the work of their fullest rank: all where they are few, else by descent."""
        num_cuts = len(start)
        if math.comb(self._num_segments - 1, num_cuts) <= LISTED:
            every = combinations(range(1, self._num_segments), num_cuts)
            return self._fullest_first(np.array(list(every)))
        here = start
        while True:
            ranked = self._neighbors(here)
            first = tuple(map(int, ranked[0]))
            if first == here:
                return ranked
            here = first

    def _neighbors(self, cuts: tuple[int, ...]) -> IntArray:
        """A partition and those beside it, by the work of their fullest rank."""
        return self._fullest_first(np.array([cuts, *_neighbours(cuts, self._num_segments)]))

    def _fullest_first(self, cuts: IntArray) -> IntArray:
        """Partitions in the order of the work of their fullest rank; of equal ones of all ranks."""
        work = self._work(cuts)
        order = np.lexsort(((work**2).sum(axis=1), work.max(axis=1)))
        ranked: IntArray = cuts[order]
        return ranked

    def _work(self, cuts: IntArray) -> FloatArray:
        """Seconds of every rank for a step, (partitions, ranks)."""
        ends = np.pad(cuts, ((0, 0), (1, 1)), constant_values=((0, 0), (0, self._num_segments)))
        sums = self._forward_s + self._backward_s
        rows = [np.diff(own[ends]) @ passing for own, passing in zip(sums, self._passing)]
        times: FloatArray = np.stack(rows, axis=1)
        return times

    def _is_shorter(self, cuts: tuple[int, ...], than: tuple[int, ...]) -> bool:
        """Whether a partition has a shorter step; not simulated where one rank's work is longer."""
        most = self._step_s(than) * (1 - 1e-9)
        least = self._work(np.array([cuts])).max()
        return self._left > 0 and least < most and self._step_s(cuts) < most

    def _step_s(self, cuts: tuple[int, ...]) -> float:
        if cuts not in self._known:
            self._left -= 1
            ends, stages = [0, *cuts, self._num_segments], np.arange(len(cuts) + 1)
            forward, backward = (
                np.diff(own[:, ends]) for own in (self._forward_s, self._backward_s)
            )
            whole = forward + backward + 1e-30  # segments may take no time
            factors = whole / whole[self._ranks, stages]
            own = stage_costs(
                tuple(forward[self._ranks, stages].tolist()),
                tuple(backward[self._ranks, stages].tolist()),
                links=tuple(self._links),
                boundary_bytes=tuple(self._cut_bytes[cut - 1] for cut in cuts),
                rank_factors=tuple(map(tuple, factors.tolist())),
            )
            self._known[cuts] = simulate(self._schedule, own).makespan
        return self._known[cuts]


def _sums(times: Sequence[Sequence[float]]) -> FloatArray:
    """Times of the segments before each segment, and of all of them, (stages, segments + 1)."""
    found: FloatArray = np.cumsum(np.pad(np.array(times), ((0, 0), (1, 0))), axis=1)
    return found


def _neighbours(cuts: tuple[int, ...], num_segments: int) -> Iterator[tuple[int, ...]]:
    """Partitions with up to two segments moved from one stage to another."""
    for low, high in combinations(range(len(cuts) + 1), 2):
        for moved in (-2, -1, 1, 2):
            own = (*cuts[:low], *(cut + moved for cut in cuts[low:high]), *cuts[high:])
            if all(one < two for one, two in zip((0, *own), (*own, num_segments), strict=True)):
                yield own
