"""Selective recomputation by memory: the segments of every stage that save their activations.

A stage holds the activations of all its microbatches in flight, so saving a segment costs more on
an early stage than on a late one, and gains the same time. The memory that a pp rank has left is
filled with the segments that take long to recompute and few bytes to save.

Source: arXiv 2206.04959 (Merak), section 5.2: there each stage saves a fraction of its segments,
all of them alike; here they are chosen one by one, by the time each saves and the bytes it costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from merak.plan.balance import Timed
from merak.plan.partition import Partition

_GRAINS = 2000
"""Steps that a budget is divided into when the knapsack problem is solved for it."""

_MOST_TRIES = 32
"""Segments that are tried one by one at the end."""


class Recomputable(Timed, Protocol):
    """Times of a segment, with those of computing its activations again."""

    def recompute_seconds(
        self, recomputed: frozenset[int] | None, most: frozenset[int] | None, /
    ) -> float:
        """Seconds of a recomputation.

        Args:
            recomputed: what runs again, as of `SegmentMemory`.
            most: the same where nothing is kept for it.
        """


def recomputing_stages(partition: Partition, saved: frozenset[int]) -> tuple[bool, ...]:
    """Recompute flags by stage: true where some segment does not save its activations."""
    return tuple(any(i not in saved for i in stage) for stage in partition.stages)


def save_fraction(
    partition: Partition,
    recompute_s: Sequence[float],
    saved_bytes: Sequence[int],
    fraction: float,
) -> frozenset[int]:
    """Segments that save activations when a fraction of every stage's segments recomputes.

    Those recompute first that take the least time for the memory they free.

    Args:
        partition: segments by stage.
        recompute_s: for each segment, the seconds of computing it again.
        saved_bytes: for each segment, its saved activations of one microbatch.
        fraction: of a stage's segments that recompute, rounded up to whole segments.
    """
    saved: list[int] = []
    for stage in partition.stages:
        num_recomputed = math.ceil(fraction * len(stage) - 1e-9)
        by_price = sorted(stage, key=lambda i: recompute_s[i] / max(saved_bytes[i], 1))
        saved += by_price[num_recomputed:]
    return frozenset(saved)


@dataclass(frozen=True, slots=True)
class RankSegments:
    """The segments of one pp rank that may save their activations.

    Args:
        segments: their numbers.
        recompute_s: for each, the seconds of computing it again.
        saved_bytes: for each, its saved activations of all microbatches in flight.
    """

    segments: tuple[int, ...]
    recompute_s: tuple[float, ...]
    saved_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PartialSaving:
    """The selective operators that recomputed segments of a pp rank may save.

    Args:
        saved_bytes: by segment, their results of all microbatches in flight.
        spared_s: by segment, the seconds of its recomputation that they spare.
    """

    saved_bytes: Mapping[int, int]
    spared_s: Mapping[int, float]


PeakOf = Callable[[frozenset[int], frozenset[int]], int]
"""Peak bytes of a pp rank, given the saved segments and those with selective saving."""

Choice = tuple[frozenset[int], frozenset[int]]
"""Segments that save all activations, and segments that save their selective operators."""


def fill_memory(
    rank: RankSegments, partial_saving: PartialSaving, peak_of: PeakOf, budget: int
) -> Choice:
    """Fill the memory of a pp rank with the saved activations that spare the most recomputation.

    In a given order of actions an iteration never gets longer when an action gets shorter, so the
    most time saved on every rank is best for the whole. Two ways are tried: whole segments first
    and selective operators of the others with the memory left; or selective operators first.

    Args:
        rank: the segments to choose from.
        partial_saving: their selective operators.
        peak_of: estimates the peak of a choice.
        budget: bytes that the rank may hold.

    Returns:
        Empty sets where not even a fully recomputing rank fits.
    """
    every = frozenset(partial_saving.saved_bytes)
    saved = fill_segments(rank, lambda chosen: peak_of(chosen, frozenset()), budget)
    added = add_partial_savings(
        rank, partial_saving, partial(peak_of, saved), budget, every - saved
    )
    choices = [(saved, added)]
    if every and peak_of(frozenset(), every) <= budget:
        rest = _less_partial(rank, partial_saving)
        saved = fill_segments(rest, lambda chosen: peak_of(chosen, every - chosen), budget)
        choices.append((saved, every - saved))
    return max(choices, key=partial(_spared_s, rank, partial_saving))


def _spared_s(rank: RankSegments, partial_saving: PartialSaving, choice: Choice) -> float:
    """Seconds of recomputation that a choice spares per microbatch."""
    seconds = dict(zip(rank.segments, rank.recompute_s, strict=True))
    whole = sum(seconds[index] for index in choice[0])
    return whole + sum(partial_saving.spared_s[index] for index in choice[1])


def _less_partial(rank: RankSegments, partial_saving: PartialSaving) -> RankSegments:
    """Times and bytes that saving a whole segment adds to saving its selective operators."""
    segments = rank.segments
    seconds = zip(segments, rank.recompute_s, strict=True)
    sizes = zip(segments, rank.saved_bytes, strict=True)
    return RankSegments(
        segments,
        tuple(s - partial_saving.spared_s.get(i, 0.0) for i, s in seconds),
        tuple(max(b - partial_saving.saved_bytes.get(i, 0), 0) for i, b in sizes),
    )


def add_partial_savings(
    rank: RankSegments,
    partial_saving: PartialSaving,
    peak_of: Callable[[frozenset[int]], int],
    budget: int,
    candidates: frozenset[int],
) -> frozenset[int]:
    """Recomputed segments that save their selective operators, as many as fit.

    Those come first that spare the most time for their bytes.

    Args:
        rank: the segments to choose from.
        partial_saving: their selective operators.
        peak_of: peak bytes, given the segments that save selective operators.
        budget: bytes that the rank may hold.
        candidates: segments that recompute.
    """

    def worth(index: int) -> float:
        return partial_saving.spared_s[index] / max(partial_saving.saved_bytes[index], 1)

    chosen = frozenset[int]()
    for index in sorted(candidates, key=worth, reverse=True)[:_MOST_TRIES]:
        if peak_of(chosen | {index}) <= budget:
            chosen |= {index}
    return chosen


def fill_segments(
    rank: RankSegments, peak_of: Callable[[frozenset[int]], int], budget: int
) -> frozenset[int]:
    """Segments that save their activations, by a knapsack whose limit the true peak corrects.

    Args:
        rank: the segments to choose from.
        peak_of: peak bytes, given the segments that save their activations.
        budget: bytes that the rank may hold.
    """
    everything, nothing = frozenset(rank.segments), frozenset[int]()
    if peak_of(everything) <= budget:
        return everything
    best = nothing
    low, high = 0.0, float(sum(rank.saved_bytes))
    spare = budget - peak_of(nothing)
    if spare <= 0:
        return nothing
    # Weights are those of all microbatches in flight at once; the peak may come at another time.
    guess = float(spare)
    for _ in range(10):
        chosen = _knapsack(rank, guess)
        if peak_of(chosen) <= budget:
            best, low = max(best, chosen, key=lambda c: _total_s(rank, c)), guess
        else:
            high = guess
        guess = (low + high) / 2
    # Where the weights were too careful, further segments still fit.
    left = [i for _, i in sorted(zip(rank.saved_bytes, rank.segments)) if i not in best]
    for index in left[:_MOST_TRIES]:
        if peak_of(best | {index}) <= budget:
            best |= {index}
    return best


def _total_s(rank: RankSegments, chosen: frozenset[int]) -> float:
    return sum(s for i, s in zip(rank.segments, rank.recompute_s) if i in chosen)


def _knapsack(rank: RankSegments, limit: float) -> frozenset[int]:
    """Segments with the longest recomputation whose bytes add up to no more than a limit."""
    grain = max(limit / _GRAINS, 1e-9)
    weights = [math.ceil(size / grain - 1e-9) for size in rank.saved_bytes]
    best: NDArray[np.float64] = np.zeros(_GRAINS + 1)
    taken: list[NDArray[np.bool_]] = []
    for weight, value in zip(weights, rank.recompute_s):
        with_it = np.full(_GRAINS + 1, -1.0)
        if weight <= _GRAINS:
            with_it[weight:] = best[: _GRAINS + 1 - weight] + value
        better = with_it > best
        taken.append(better)
        best = np.where(better, with_it, best)
    chosen, left = [], _GRAINS
    for index in range(len(weights) - 1, -1, -1):
        if taken[index][left]:
            chosen.append(rank.segments[index])
            left -= weights[index]
    return frozenset(chosen)
