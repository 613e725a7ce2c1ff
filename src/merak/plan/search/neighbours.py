"""Neighbours of a candidate: those that differ from it by one step in one choice.

Estimates do not know how much faster a larger microbatch or another split computes; a price does.
So the search also prices the neighbours of the best plan, until none is better.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from merak.plan.options import LAYOUT, is_searched
from merak.plan.price.candidate import Candidate
from merak.plan.recompute_spec import RECOMPUTES
from merak.schedule.ir import USUAL

_FREE = {name: name for name in LAYOUT if is_searched(name) and name != "recompute"} | {
    "schedule_options": "schedule",
    "sub_pipelining": "sequence_parallel",
}
"""Fields whose other values are all one step away, and the choice that each is part of."""


class Neighbours:
    """Neighbours of candidates within a space.

    Args:
        candidates: the space.
    """

    def __init__(self, candidates: Iterable[Candidate]) -> None:
        self._known = {own.choices(): own for own in candidates}
        self._variants: dict[Any, list[Candidate]] = {}
        self._degrees: dict[Any, list[Candidate]] = {}
        for own in self._known.values():
            self._degrees.setdefault(own.choices("ep"), []).append(own)
            self._variants.setdefault(own.choices(*_FREE), []).append(own)

    def of(self, candidate: Candidate) -> Iterator[Candidate]:
        """Candidates that differ from one in a single choice: microbatches and degrees first."""
        for own in _microbatches(candidate):
            yield from self._same(own)
        for own in (candidate, *_degrees(candidate)):  # of which each has its own expert degrees
            found = self._degrees.get(own.choices("ep"), ())
            yield from (other for other in found if other.choices() != candidate.choices())
        for own in _recomputes(candidate):
            yield from self._same(own)
        for own in self._variants.get(candidate.choices(*_FREE), ()):
            if _distance(own, candidate) == 1:
                yield own

    def _same(self, own: Candidate) -> Iterator[Candidate]:
        if own.choices() in self._known:
            yield self._known[own.choices()]


def _microbatches(own: Candidate) -> Iterator[Candidate]:
    """Twice the microbatch, perhaps with more recomputed, and half of it."""
    samples = own.microbatch * own.num_microbatches
    for size, more in ((2 * own.microbatch, 1), (own.microbatch // 2, -1)):
        if size and samples % size == 0:
            other = replace(own, microbatch=size, num_microbatches=samples // size)
            yield other
            yield from _recomputing(other, more)


def _degrees(own: Candidate) -> Iterator[Candidate]:
    """Twice of one degree and half of another."""
    batch = own.dp * own.microbatch * own.num_microbatches
    for more in ("pp", "dp", "tp", "cp"):
        for less in ("pp", "dp", "tp", "cp"):
            if more != less and getattr(own, less) % 2 == 0:
                degrees = {more: 2 * getattr(own, more), less: getattr(own, less) // 2}
                other = replace(own, **degrees)
                if batch % (other.dp * other.microbatch) == 0:
                    count = batch // (other.dp * other.microbatch)
                    yield without_idle(replace(other, num_microbatches=count))


def without_idle(own: Candidate) -> Candidate:
    """A candidate without what its degrees leave nothing to do for, such as ZeRO at dp=1.

    Args:
        own: a candidate whose degrees have changed.
    """
    if own.replicas == 1:
        own = replace(own, zero=0)
    if own.tp == 1:
        own = replace(own, sequence_parallel=False, sub_pipelining="off")
    if own.pp == 1:
        own = replace(own, schedule=USUAL, schedule_options=MappingProxyType({}))
    return own


def _recomputes(own: Candidate) -> Iterator[Candidate]:
    for more in (1, -1):
        yield from _recomputing(own, more)


def _recomputing(own: Candidate, more: int) -> Iterator[Candidate]:
    """The same with so many levels more of recomputation."""
    if own.recompute in RECOMPUTES:
        level = RECOMPUTES.index(own.recompute) + more
        if 0 <= level < len(RECOMPUTES):
            yield replace(own, recompute=RECOMPUTES[level])


def _distance(one: Candidate, other: Candidate) -> int:
    """Number of free choices in which two candidates differ."""
    differ = (name for name in _FREE if getattr(one, name) != getattr(other, name))
    return len({_FREE[name] for name in differ})
