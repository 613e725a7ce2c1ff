"""Status of this rank outside the engine's steps: its phase, and the ranks that it waits for.

The main thread sets it, at the cost of a few assignments; the watchdog reads it from its own
threads (`merak.core.health.watchdog`) and publishes it to the other ranks.
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
    """Object of a wait, as text that ends in a preposition, and the ranks that are waited for."""

    what: str
    peers: tuple[int, ...]


class Status(NamedTuple):
    """Phase and wait of a rank, and since when on `time.perf_counter`'s clock.

    A phase is work that may rightly take minutes on one rank while others wait for it; empty
    outside of all, where the time is the user's.
    """

    phase: str
    wait: Wait | None
    since_s: float


class Report(NamedTuple):
    """Report of this rank's status in words, for the watchdog.

    Attributes:
        doing: the rest of a sentence that begins with the rank.
        waits: the part of it with the time of the wait; empty where it waits for nobody.
        for_s: seconds of that.
        is_timed: whether the watchdog limits it.
        is_busy: whether it is in a phase that other ranks may have to wait for.
    """

    doing: str
    waits: str
    for_s: float
    is_timed: bool
    is_busy: bool


_current = [Status("", None, time.perf_counter())]

_at_first_step: list[Callable[[], object]] = []


def during(name: str) -> Callable[[Callable[Given, Result]], Callable[Given, Result]]:
    """Decorate functions that are a phase of this rank.

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
    """Enter a phase of work on this rank that other ranks may have to wait for.

    Args:
        name: as a sentence goes on after "is", such as "tracing the model".
    """
    with _as(name, None):
        yield


@contextmanager
def waiting(what: str, peers: tuple[int, ...]) -> Iterator[None]:
    """Enter a wait of this rank for others.

    Args:
        what: object of the wait, ending in a preposition that "rank 3" can follow.
        peers: global ranks that are waited for.
    """
    with _as(_current[0].phase, Wait(what, peers)):
        yield


@contextmanager
def waiting_for_all(what: str) -> Iterator[None]:
    """Enter a wait of this rank for all others of the job, as in a collective of all ranks.

    Args:
        what: object of the wait, ending in a preposition that "rank 3" can follow.
    """
    ranks = range(dist.get_world_size()) if dist.is_initialized() else ()
    with waiting(what, tuple(rank for rank in ranks if rank != dist.get_rank())):
        yield


@contextmanager
def waiting_for_rank0(what: str) -> Iterator[None]:
    """Enter a wait of all ranks for a decision of rank 0.

    Args:
        what: the decision as a noun.
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


def at_first_step(call: Callable[[], object]) -> None:
    """Register a function to call when this process has run its first step.

    Args:
        call: without arguments.
    """
    _at_first_step.append(call)


def end_step() -> None:
    """Mark the end of a step of training or evaluation."""
    while _at_first_step:
        _at_first_step.pop()()


def status() -> Status:
    """Return the status of this process."""
    return _current[0]


def report() -> Report:
    """Describe the status of this process in words."""
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
    """Format rank numbers for a sentence."""
    numbers = ", ".join(map(str, ranks))
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"
