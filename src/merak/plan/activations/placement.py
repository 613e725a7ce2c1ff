"""Placement of a pp rank's activations where memory is short: on device, offloaded, recomputed.

A recomputed segment certainly costs the time of its forward. An offloaded one costs time only where
its copies outlast the computation beside them; but all segments of a rank share its link to the
host. So those are offloaded first that take long to recompute and are quick to copy, as many as
the link has room for, and the simulated iteration says how many those are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from merak.plan.activations.recompute import (
    PartialSaving,
    RankSegments,
    add_partial_savings,
    fill_memory,
    fill_segments,
)

_MOST_MOVES = 64
"""Segments whose placement is changed one by one at the end of the search."""

_LEAST_GAIN = 1e-6
"""A placement is better if its iteration is shorter by more than this fraction."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Activations of a pp rank's segments by place; a segment in none of the sets recomputes.

    Args:
        on_device: segments that save them on the device.
        offloaded: segments that save them in host memory.
        selective: recomputed segments that save the results of their selective operators.
    """

    on_device: frozenset[int] = frozenset()
    offloaded: frozenset[int] = frozenset()
    selective: frozenset[int] = frozenset()

    @property
    def saved(self) -> frozenset[int]:
        """Segments that do not recompute."""
        return self.on_device | self.offloaded

    def within(self, segments: frozenset[int]) -> Placement:
        """The placement of some segments alone."""
        return Placement(
            self.on_device & segments, self.offloaded & segments, self.selective & segments
        )

    def __or__(self, other: Placement) -> Placement:
        return Placement(
            self.on_device | other.on_device,
            self.offloaded | other.offloaded,
            self.selective | other.selective,
        )


@dataclass(frozen=True, slots=True)
class PlacementOptions:
    """The segments of a pp rank, and the places that their activations may have.

    Args:
        rank: the segments, with the time and memory of each.
        copy_s: by segment that has something to offload, the seconds of both copies.
        may_recompute: whether segments may recompute; else all of them save their activations.
        partial_saving: the selective operators that recomputed segments may save.
    """

    rank: RankSegments
    copy_s: Mapping[int, float]
    may_recompute: bool
    partial_saving: PartialSaving


PeakOf = Callable[[Placement], int]
"""Peak bytes on the pp rank's device."""

SecondsOf = Callable[[Placement], tuple[float, float]]
"""Seconds of an iteration, and of the pp rank's own work in it."""


def choose_placement(
    options: PlacementOptions, peak_of: PeakOf, seconds_of: SecondsOf, budget: int
) -> Placement | None:
    """The placement of a pp rank's activations that fits with the shortest iteration.

    Args:
        options: of the rank.
        peak_of: estimates the memory of a placement.
        seconds_of: estimates its time.
        budget: bytes that the rank may hold.

    Returns:
        None where nothing fits.
    """
    everything = Placement(on_device=frozenset(options.rank.segments))
    if peak_of(everything) <= budget:
        return everything
    found = list(_candidates(options, peak_of, budget))
    if not found:
        return None
    best = min(found, key=seconds_of)
    return _improved(best, options, peak_of, seconds_of, budget)


def _candidates(options: PlacementOptions, peak_of: PeakOf, budget: int) -> Iterator[Placement]:
    """Placements that fit: the best segments to copy are offloaded, a quarter of them up to all."""
    rank, most = options.rank, len(options.copy_s)
    recompute_s = dict(zip(rank.segments, rank.recompute_s, strict=True))
    in_order = sorted(
        options.copy_s, key=lambda i: recompute_s[i] / options.copy_s[i], reverse=True
    )
    counts = {most}
    if options.may_recompute:
        counts = {math.ceil(most * quarter / 4) for quarter in range(1, 5)}
        without = _without_copies(options, peak_of, budget)
        if peak_of(without) <= budget:
            yield without
    for count in sorted(counts):
        offloaded = frozenset(in_order[:count])
        forced = frozenset() if options.may_recompute else frozenset(rank.segments) - offloaded
        base = Placement(forced, offloaded)
        if peak_of(base) <= budget:
            yield _filled(base, options, peak_of, budget)


def _without_copies(options: PlacementOptions, peak_of: PeakOf, budget: int) -> Placement:
    """The placement that fits with nothing offloaded: the other segments recompute."""
    saved, selective = fill_memory(
        options.rank,
        options.partial_saving,
        lambda on_device, some: peak_of(Placement(on_device, selective=some)),
        budget,
    )
    return Placement(saved, selective=selective)


def _filled(base: Placement, options: PlacementOptions, peak_of: PeakOf, budget: int) -> Placement:
    """A placement with the rest of the device's memory filled, longest recomputations first."""
    rank = options.rank
    free = [number for number, i in enumerate(rank.segments) if i not in base.on_device]
    rest = RankSegments(
        tuple(rank.segments[number] for number in free),
        tuple(
            options.copy_s[i] if i in base.offloaded else rank.recompute_s[number]
            for number, i in ((number, rank.segments[number]) for number in free)
        ),
        tuple(rank.saved_bytes[number] for number in free),
    )

    def with_on_device(chosen: frozenset[int]) -> Placement:
        return Placement(base.on_device | chosen, base.offloaded - chosen)

    filled = with_on_device(
        fill_segments(rest, lambda chosen: peak_of(with_on_device(chosen)), budget)
    )
    recomputed = frozenset(options.partial_saving.saved_bytes) - filled.saved
    selective = add_partial_savings(
        rank,
        options.partial_saving,
        lambda chosen: peak_of(replace(filled, selective=chosen)),
        budget,
        recomputed,
    )
    return replace(filled, selective=selective)


def _improved(
    best: Placement,
    options: PlacementOptions,
    peak_of: PeakOf,
    seconds_of: SecondsOf,
    budget: int,
) -> Placement:
    """The placement after changing segments one by one, each change that is shorter and fits."""
    seconds = seconds_of(best)
    for segment in options.rank.segments[:_MOST_MOVES]:
        for other in _neighbours(best, segment, options):
            found = seconds_of(other)
            if _is_shorter(found, seconds) and peak_of(other) <= budget:
                best, seconds = other, found
    return best


def _neighbours(now: Placement, segment: int, options: PlacementOptions) -> Iterator[Placement]:
    """Placements that differ in one segment."""
    one = frozenset({segment})
    without = Placement(now.on_device - one, now.offloaded - one, now.selective - one)
    if segment not in now.on_device:
        yield replace(without, on_device=without.on_device | one)
    if segment not in now.offloaded and segment in options.copy_s:
        yield replace(without, offloaded=without.offloaded | one)
    if segment in now.saved and options.may_recompute:
        yield without
        if segment in options.partial_saving.saved_bytes:
            yield replace(without, selective=without.selective | one)


def _is_shorter(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether an iteration is shorter, or as long with less work on the pp rank."""
    if abs(one[0] - other[0]) > _LEAST_GAIN * other[0]:
        return one[0] < other[0]
    return one[1] < (1 - _LEAST_GAIN) * other[1]
