"""Computation that is made to last: functions of segments take a known time, asleep.

Ranks that sleep do not share cores, so many of them compute beside one another on a few.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from merak.graph.joint.generate import Part, Piece
from merak.graph.joint.segment import Functions, JointSegment


class Seconds(NamedTuple):
    """How long the functions of a segment last.

    Args:
        forward: also of one that saves nothing.
        recompute: of what is not kept.
        backward: of the whole one.
        weights: of what a split backward leaves for later, which is part of it.
    """

    forward: float
    recompute: float
    backward: float
    weights: float = 0.0


Slow = Callable[[Part, float], Part]
"""Makes a part take so many seconds."""


def filled(part: Part, seconds: float) -> Part:
    """A part that takes a known time, asleep, what it computes and exchanges included.

    Args:
        part: the functions.
        seconds: how long, unless it takes longer by itself.
    """
    *others, last = part

    def slowed(given: list[Any]) -> Any:
        end = time.perf_counter() + seconds
        made = last(given)
        time.sleep(max(0.0, end - time.perf_counter()))
        return made

    pieces: tuple[Piece, ...] = (*others, slowed)
    return pieces


def all_lasting(parts: Functions, seconds: Seconds, slow: Slow = filled) -> Functions:
    """Functions of a segment that take known times."""
    later = parts.weights is not None
    return replace(
        parts,
        forward=slow(parts.forward, seconds.forward),
        plain=slow(parts.plain, seconds.forward),
        recompute=slow(parts.recompute, seconds.recompute),
        backward=slow(parts.backward, seconds.backward - (seconds.weights if later else 0.0)),
        weights=slow(parts.weights, seconds.weights) if parts.weights is not None else None,
    )


def make_last(seconds_of: Callable[[JointSegment], Seconds]) -> None:
    """Let segments of this process take known times from now on, in the engine and in a profile.

    Args:
        seconds_of: says how long one takes.
    """
    slowed = lru_cache(maxsize=None)(all_lasting)

    def lasting_parts(self: JointSegment, *args: Any) -> Functions | None:
        found = _PARTS(self, *args)
        return None if found is None else slowed(found, seconds_of(self))

    JointSegment.parts = lasting_parts  # type: ignore[method-assign]


_PARTS = JointSegment.parts
