"""Where a segment's activations are too many to keep: computed again, or kept in host memory.

A segment that recomputes takes its forward's time for certain. One that is copied to host memory
and back takes time only where the copies outlast what is computed meanwhile; but all segments of a
rank share its way to the host. So those go there first that are dear to compute again and cheap to
copy, as many as the way has room for, and the simulated iteration says how many those are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from merak.plan.activations.recompute import Parts, Position, add_parts, fill_partly, fill_whole

_MOST_MOVES = 64
"""Segments that are tried elsewhere, one by one, at the end."""

_LEAST_GAIN = 1e-6
"""A choice is better if it is shorter by more than this share."""


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where the activations of a position's segments are; what is in none of these recomputes.

    Args:
        here: segments that keep them on the device.
        host: segments that keep them in host memory.
        partly: segments that recompute, and keep the results of dear operators.
    """

    here: frozenset[int] = frozenset()
    host: frozenset[int] = frozenset()
    partly: frozenset[int] = frozenset()

    @property
    def kept(self) -> frozenset[int]:
        """Segments that do not recompute."""
        return self.here | self.host


@dataclass(frozen=True, slots=True)
class Options:
    """What a position may do.

    Args:
        position: its segments, the time of computing each again, and what it holds.
        copy_s: by segment that has something to copy, the time of copies there and back.
        may_recompute: whether a segment may recompute; else all are kept somewhere.
        parts: what segments that recompute may keep of themselves.
    """

    position: Position
    copy_s: Mapping[int, float]
    may_recompute: bool
    parts: Parts


PeakOf = Callable[[Whereabouts], int]
"""The most bytes that the position holds on the device."""

SecondsOf = Callable[[Whereabouts], tuple[float, float]]
"""The time of an iteration, and of the position's own work in it."""


def choose(
    options: Options, peak_of: PeakOf, seconds_of: SecondsOf, budget: int
) -> Whereabouts | None:
    """The choice that fits with the shortest iteration.

    Args:
        options: of the position.
        peak_of: judges its memory.
        seconds_of: judges its time.
        budget: bytes that the position may hold.

    Returns:
        None where nothing fits.
    """
    everything = Whereabouts(here=frozenset(options.position.segments))
    if peak_of(everything) <= budget:
        return everything
    found = list(_candidates(options, peak_of, budget))
    if not found:
        return None
    best = min(found, key=seconds_of)
    return _improved(best, options, peak_of, seconds_of, budget)


def _candidates(options: Options, peak_of: PeakOf, budget: int) -> Iterator[Whereabouts]:
    """Choices that fit: so many of the best to copy do that where they are not kept here."""
    position, whole = options.position, len(options.copy_s)
    again_s = dict(zip(position.segments, position.saved_s, strict=True))
    in_order = sorted(options.copy_s, key=lambda i: again_s[i] / options.copy_s[i], reverse=True)
    counts = {whole}
    if options.may_recompute:
        counts = {math.ceil(whole * part / 4) for part in range(1, 5)}
        alone = _without_copies(options, peak_of, budget)
        if peak_of(alone) <= budget:
            yield alone
    for count in sorted(counts):
        host = frozenset(in_order[:count])
        forced = frozenset() if options.may_recompute else frozenset(position.segments) - host
        base = Whereabouts(forced, host)
        if peak_of(base) <= budget:
            yield _filled(base, options, peak_of, budget)


def _without_copies(options: Options, peak_of: PeakOf, budget: int) -> Whereabouts:
    """What fits where the others recompute."""
    kept, partly = fill_partly(
        options.position,
        options.parts,
        lambda here, some: peak_of(Whereabouts(here, partly=some)),
        budget,
    )
    return Whereabouts(kept, partly=partly)


def _filled(base: Whereabouts, options: Options, peak_of: PeakOf, budget: int) -> Whereabouts:
    """Have as much on the device as fits, what saves most time first; and parts of the rest."""
    position = options.position
    free = [place for place, i in enumerate(position.segments) if i not in base.here]
    rest = Position(
        tuple(position.segments[place] for place in free),
        tuple(
            options.copy_s[i] if i in base.host else position.saved_s[place]
            for place, i in ((place, position.segments[place]) for place in free)
        ),
        tuple(position.held_bytes[place] for place in free),
    )

    def with_here(chosen: frozenset[int]) -> Whereabouts:
        return Whereabouts(base.here | chosen, base.host - chosen)

    filled = with_here(fill_whole(rest, lambda chosen: peak_of(with_here(chosen)), budget))
    again = frozenset(options.parts.held_bytes) - filled.kept
    partly = add_parts(
        position,
        options.parts,
        lambda chosen: peak_of(replace(filled, partly=chosen)),
        budget,
        again,
    )
    return replace(filled, partly=partly)


def _improved(
    best: Whereabouts, options: Options, peak_of: PeakOf, seconds_of: SecondsOf, budget: int
) -> Whereabouts:
    """Put segments elsewhere one by one, as long as that is shorter and fits."""
    seconds = seconds_of(best)
    for segment in options.position.segments[:_MOST_MOVES]:
        for other in _elsewhere(best, segment, options):
            found = seconds_of(other)
            if _is_shorter(found, seconds) and peak_of(other) <= budget:
                best, seconds = other, found
    return best


def _elsewhere(now: Whereabouts, segment: int, options: Options) -> Iterator[Whereabouts]:
    one = frozenset({segment})
    without = Whereabouts(now.here - one, now.host - one, now.partly - one)
    if segment not in now.here:
        yield replace(without, here=without.here | one)
    if segment not in now.host and segment in options.copy_s:
        yield replace(without, host=without.host | one)
    if segment in now.kept and options.may_recompute:
        yield without
        if segment in options.parts.held_bytes:
            yield replace(without, partly=without.partly | one)


def _is_shorter(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether an iteration is shorter, or as long with less work on the position."""
    if abs(one[0] - other[0]) > _LEAST_GAIN * other[0]:
        return one[0] < other[0]
    return one[1] < (1 - _LEAST_GAIN) * other[1]
