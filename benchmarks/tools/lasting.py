"""Computation that is made to last: functions of segments take a known time, asleep.

Ranks that sleep do not share cores, so many of them compute beside one another on a few.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch.distributed as dist

from merak.graph.joint.generate import Part, Piece
from merak.graph.joint.segment import Functions, JointSegment
from merak.ops import collectives


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


class _Timed:
    """torch.distributed, with a count of the seconds in collectives that this process waits for."""

    seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        found = getattr(dist, name)
        if name not in _COLLECTIVES:
            return found

        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            made = found(*args, **kwargs)
            self.seconds += time.perf_counter() - start
            return made

        return run


_COLLECTIVES = frozenset(("all_reduce", "all_gather_single", "reduce_scatter_single"))
"""Those of torch that tensor parallelism runs inside of segments."""

_timed = _Timed()


def filled(part: Part, seconds: float) -> Part:
    """A part that takes a known time, asleep, what it computes included, beside its collectives.

    Args:
        part: the functions.
        seconds: how long, unless it takes longer by itself.
    """
    *others, last = part

    def slowed(given: list[Any]) -> Any:
        end, exchanged = time.perf_counter() + seconds, _timed.seconds
        made = last(given)
        end += _timed.seconds - exchanged
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
    vars(collectives)["dist"] = _timed

    def lasting_parts(self: JointSegment, *args: Any) -> Functions | None:
        found = _PARTS(self, *args)
        return None if found is None else slowed(found, seconds_of(self))

    JointSegment.parts = lasting_parts  # type: ignore[method-assign]


_PARTS = JointSegment.parts
