"""The status of this rank outside the engine's steps: its phase, and what it waits for.

The main thread says it as it goes, for a few assignments each time; the watchdog reads it from its
own threads (`merak.core.health.watchdog`) and tells the other ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import NamedTuple, ParamSpec, TypeVar

import torch.distributed as dist

Given = ParamSpec("Given")
Result = TypeVar("Result")


class Wait(NamedTuple):
    """What a rank waits for, ending in a preposition, and the ranks that it needs for it."""

    what: str
    peers: tuple[int, ...]


class Status(NamedTuple):
    """A rank's phase and wait, and since when on `time.perf_counter`'s clock.

    A phase is work that may rightly take minutes on one rank while others wait for it; empty
    outside of all, where the time is the user's.
    """

    phase: str
    wait: Wait | None
    since_s: float


class Report(NamedTuple):
    """What the watchdog tells of this rank.

    Attributes:
        doing: the rest of a sentence that begins with the rank.
        waits: the part of it that says how long it has waited or worked; empty where it waits for
            nobody.
        for_s: seconds that it has done so.
        is_timed: whether that is limited.
        is_busy: whether it works where others are to have patience.
    """

    doing: str
    waits: str
    for_s: float
    is_timed: bool
    is_busy: bool


_current = [Status("", None, time.perf_counter())]


def during(name: str) -> Callable[[Callable[Given, Result]], Callable[Given, Result]]:
    """A decorator of functions that are a phase of this rank.

    Args:
        name: as of `phase`.
    """

    def decorated(function: Callable[Given, Result]) -> Callable[Given, Result]:
        @wraps(function)
        def called(*args: Given.args, **kwargs: Given.kwargs) -> Result:
            with phase(name):
                return function(*args, **kwargs)

        return called

    return decorated


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Inside, this rank is in a phase of work that others may have to wait for.

    Args:
        name: as a sentence goes on after "is", such as "tracing the model".
    """
    with _as(name, None):
        yield


@contextmanager
def waiting(what: str, peers: tuple[int, ...]) -> Iterator[None]:
    """Inside, this rank waits for others.

    Args:
        what: for what, ending in a preposition that "rank 3" can follow.
        peers: global ranks that it needs for that.
    """
    with _as(_current[0].phase, Wait(what, peers)):
        yield


@contextmanager
def waiting_for_all(what: str) -> Iterator[None]:
    """Inside, this rank waits for all others of the job, as in a collective of all ranks.

    Args:
        what: for what, ending in a preposition that "rank 3" can follow.
    """
    ranks = range(dist.get_world_size()) if dist.is_initialized() else ()
    with waiting(what, tuple(rank for rank in ranks if rank != dist.get_rank())):
        yield


@contextmanager
def waiting_for_first(what: str) -> Iterator[None]:
    """Inside, all ranks of the job take what rank 0 has decided.

    Args:
        what: what it is.
    """
    if dist.is_initialized() and dist.get_rank() == 0:
        with waiting_for_all(f"{what} to be taken by"):
            yield
    else:
        with waiting(f"{what} from", (0,)):
            yield


@contextmanager
def _as(name: str, wait: Wait | None) -> Iterator[None]:
    before = _current[0]
    _current[0] = Status(name, wait, time.perf_counter())
    try:
        yield
    finally:
        _current[0] = before._replace(since_s=time.perf_counter())


def status() -> Status:
    """The status of this process."""
    return _current[0]


def report() -> Report:
    """The status of this process in words."""
    found = status()
    for_s = time.perf_counter() - found.since_s
    place = f"is {found.phase}" if found.phase else ""
    if found.wait is not None:
        waits = f"has waited {for_s:.1f} s for {found.wait.what} {named(found.wait.peers)}"
        return Report(f"{place} and {waits}" if place else waits, waits, for_s, True, False)
    if place:
        doing = f"{place} for {for_s:.1f} s and waits for nobody"
        return Report(doing, "", for_s, False, True)
    doing = f"is outside the engine's steps for {for_s:.1f} s and waits for nobody"
    return Report(doing, "", for_s, False, False)


def named(ranks: tuple[int, ...]) -> str:
    """Ranks as a sentence names them."""
    numbers = ", ".join(map(str, ranks))
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"
