"""Which segments keep their activations and which compute them again, stage by stage.

A stage holds the activations of all its microbatches in flight, so keeping a segment costs more
on an early stage than on a late one, and saves the same. What a rank has left of its memory is
filled with the segments that are dear to compute again and cheap to keep.

Source: arXiv 2206.04959 (Merak), section 5.2: there each stage keeps a share of its segments, all
of them alike; here they are chosen one by one, by what each saves and costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from merak.plan.balance import Timed
from merak.plan.partition import Partition
from merak.schedule.costs import Costs, stage_costs

_GRAINS = 2000
"""Parts that a budget is divided into when segments are chosen for it."""

_MOST_TRIES = 32
"""Segments that are tried one by one at the end."""


def recomputing_stages(partition: Partition, kept: frozenset[int]) -> tuple[bool, ...]:
    """For each stage, whether some segment of it recomputes."""
    return tuple(any(i not in kept for i in stage) for stage in partition.stages)


def pipeline_costs(
    partition: Partition, times: Sequence[Timed], kept: frozenset[int], **others: object
) -> Costs:
    """What the stages cost, when some segments keep their activations.

    Args:
        partition: segments by stage.
        times: of the segments.
        kept: segments that are not computed again.
        **others: further fields of `Costs`.
    """
    recompute_s = tuple(
        sum(times[i].forward_s for i in stage if i not in kept) for stage in partition.stages
    )
    return stage_costs(
        tuple(sum(times[i].forward_s for i in stage) for stage in partition.stages),
        tuple(sum(times[i].backward_s for i in stage) for stage in partition.stages),
        recompute_s=recompute_s,
        **others,
    )


def keep_share(
    partition: Partition, times: Sequence[Timed], held_bytes: Sequence[int], share: float
) -> frozenset[int]:
    """Let a share of every stage's segments recompute, the cheapest for the memory they free.

    Args:
        partition: segments by stage.
        times: of the segments.
        held_bytes: what each segment holds for a microbatch if it keeps its activations.
        share: of a stage's segments; a part of a segment counts as a whole one.

    Returns:
        The segments that keep their activations.
    """
    kept: list[int] = []
    for stage in partition.stages:
        num_recomputed = math.ceil(share * len(stage) - 1e-9)
        freed = sorted(stage, key=lambda i: times[i].forward_s / max(held_bytes[i], 1))
        kept += freed[num_recomputed:]
    return frozenset(kept)


def paper_ratios(first: float, num_stages: int) -> tuple[float, ...]:
    """For each stage, the share of segments that keep their activations, by Merak's formula.

    Args:
        first: that of the first stage, 0 to 1.
        num_stages: pipeline degree.

    Source: arXiv 2206.04959, section 5.2, the recursive formula for α_i.
    """
    ratios = [min(1.0, (num_stages - 1) * first / (num_stages - i)) for i in range(1, num_stages)]
    if num_stages >= 3:
        ratios[-1] = ratios[-2]
    return (*ratios, 1.0)


def keep_ratios(partition: Partition, ratios: Sequence[float]) -> frozenset[int]:
    """Let the first segments of each stage keep their activations, as many as a ratio says."""
    return frozenset(
        index
        for stage, ratio in zip(partition.stages, ratios, strict=True)
        for index in stage[: math.floor(ratio * len(stage) + 1e-9)]
    )


@dataclass(frozen=True, slots=True)
class Position:
    """The segments of one pipeline position, to choose from.

    Args:
        segments: their numbers.
        saved_s: for each, the time of computing it again.
        held_bytes: for each, what it holds for all microbatches in flight if it keeps its
            activations.
    """

    segments: tuple[int, ...]
    saved_s: tuple[float, ...]
    held_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Parts:
    """What recomputing segments of a position may keep of themselves.

    Args:
        held_bytes: by segment, for all microbatches in flight.
        saved_share: by segment, the part of its time that this saves.
    """

    held_bytes: Mapping[int, int]
    saved_share: Mapping[int, float]


PeakOf = Callable[[frozenset[int], frozenset[int]], int]
"""The most bytes held when some segments keep their activations, and some others a part of them."""

Choice = tuple[frozenset[int], frozenset[int]]
"""Segments that keep all their activations, and segments that keep a part of them."""


def fill_partly(position: Position, parts: Parts, peak_of: PeakOf, budget: int) -> Choice:
    """Choose what a position keeps, so that it fills its memory.

    In a given order of actions an iteration never gets longer when an action gets shorter, so the
    most time saved on every position is best for the whole. Two ways are tried: whole segments
    first, and parts of the others with what is left; or parts of all segments first.

    Args:
        position: what there is to choose from.
        parts: of which segments there are parts to keep, and what they hold and save.
        peak_of: judges a choice; only segments of the position matter.
        budget: what the position may hold.

    Returns:
        What is kept; nothing where not even that fits.
    """
    every = frozenset(parts.held_bytes)
    kept = fill_whole(position, lambda chosen: peak_of(chosen, frozenset()), budget)
    choices = [(kept, add_parts(position, parts, partial(peak_of, kept), budget, every - kept))]
    if every and peak_of(frozenset(), every) <= budget:
        rest = _without(position, parts)
        kept = fill_whole(rest, lambda chosen: peak_of(chosen, every - chosen), budget)
        choices.append((kept, every - kept))
    return max(choices, key=partial(_saved_by, position, parts))


def _saved_by(position: Position, parts: Parts, choice: Choice) -> float:
    seconds = dict(zip(position.segments, position.saved_s, strict=True))
    whole = sum(seconds[index] for index in choice[0])
    return whole + sum(seconds[index] * parts.saved_share[index] for index in choice[1])


def _without(position: Position, parts: Parts) -> Position:
    """What is left to keep where every segment keeps its part."""
    segments = position.segments
    saved = zip(segments, position.saved_s, strict=True)
    held = zip(segments, position.held_bytes, strict=True)
    return Position(
        segments,
        tuple(s * (1 - parts.saved_share.get(i, 0.0)) for i, s in saved),
        tuple(max(b - parts.held_bytes.get(i, 0), 0) for i, b in held),
    )


def add_parts(
    position: Position,
    parts: Parts,
    peak_of: Callable[[frozenset[int]], int],
    budget: int,
    candidates: frozenset[int],
) -> frozenset[int]:
    """As many parts as fit, those first that save most time for their bytes.

    Args:
        position: what there is to choose from.
        parts: of which segments there are parts to keep, and what they hold and save.
        peak_of: the most bytes held with some parts.
        budget: what the position may hold.
        candidates: segments that recompute.
    """
    seconds = dict(zip(position.segments, position.saved_s, strict=True))

    def worth(index: int) -> float:
        return seconds[index] * parts.saved_share[index] / max(parts.held_bytes[index], 1)

    chosen = frozenset[int]()
    for index in sorted(candidates, key=worth, reverse=True)[:_MOST_TRIES]:
        if peak_of(chosen | {index}) <= budget:
            chosen |= {index}
    return chosen


def fill_whole(
    position: Position, peak_of: Callable[[frozenset[int]], int], budget: int
) -> frozenset[int]:
    """The best choice whose estimated weights fit so much that the true peak fits the budget.

    Args:
        position: what there is to choose from.
        peak_of: the most bytes held when some segments keep their activations.
        budget: what the position may hold.
    """
    everything, nothing = frozenset(position.segments), frozenset[int]()
    if peak_of(everything) <= budget:
        return everything
    best = nothing
    low, high = 0.0, float(sum(position.held_bytes))
    spare = budget - peak_of(nothing)
    if spare <= 0:
        return nothing
    # Weights are those of all microbatches in flight at once; the peak may come at another time.
    guess = float(spare)
    for _ in range(10):
        chosen = _knapsack(position, guess)
        if peak_of(chosen) <= budget:
            best, low = max(best, chosen, key=lambda c: _saved(position, c)), guess
        else:
            high = guess
        guess = (low + high) / 2
    # What the weights were too careful about still fits.
    left = [i for _, i in sorted(zip(position.held_bytes, position.segments)) if i not in best]
    for index in left[:_MOST_TRIES]:
        if peak_of(best | {index}) <= budget:
            best |= {index}
    return best


def _saved(position: Position, chosen: frozenset[int]) -> float:
    return sum(s for i, s in zip(position.segments, position.saved_s) if i in chosen)


def _knapsack(position: Position, limit: float) -> frozenset[int]:
    """The segments that save the most time of all that hold at most so many bytes."""
    grain = max(limit / _GRAINS, 1e-9)
    weights = [math.ceil(held / grain - 1e-9) for held in position.held_bytes]
    best: NDArray[np.float64] = np.zeros(_GRAINS + 1)
    taken: list[NDArray[np.bool_]] = []
    for weight, value in zip(weights, position.saved_s):
        with_it = np.full(_GRAINS + 1, -1.0)
        if weight <= _GRAINS:
            with_it[weight:] = best[: _GRAINS + 1 - weight] + value
        better = with_it > best
        taken.append(better)
        best = np.where(better, with_it, best)
    chosen, left = [], _GRAINS
    for index in range(len(weights) - 1, -1, -1):
        if taken[index][left]:
            chosen.append(position.segments[index])
            left -= weights[index]
    return frozenset(chosen)
