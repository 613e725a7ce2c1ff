"""Roll call: all ranks come to a method that they must call together, or one of them has ended.

What rank 0 does alone, others may wait for, without its knowing whether they do.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch.distributed as dist

from merak.core.errors import TrainingError
from merak.core.health import failure, store
from merak.core.health.heartbeat import Peers
from merak.core.health.status import named, waiting, waiting_for_all
from merak.core.health.timeouts import until

_DONE = "merak/done"
"""Prefix of the store's counters of what rank 0 has done."""

_LEAVES_S = 5.0
"""Seconds that a rank's last heartbeat gets to arrive, once its connections are closed."""


def call_the_roll(method: str) -> None:
    """Wait for all ranks to call a method; all of them call this first.

    Args:
        method: its name, as the user calls it.

    Raises:
        TrainingError: a rank has ended its script without calling it, or has called another.
    """
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return
    present: list[Any] = [None] * dist.get_world_size()
    try:
        with waiting_for_all(f"the call of {method} by"):
            dist.all_gather_object(present, method)
    except Exception as error:
        left = _ranks_that_left() if failure.is_lost_connection(error) else ()
        if not left:
            raise
        raise TrainingError(
            f"rank {dist.get_rank()} has called {method}, but {named(left)} ended without: all "
            "ranks call it together, since each has a part of the weights; take it out of `if "
            "trainer.is_world_process_zero()` and the like (rank 0 alone writes what is written "
            "once)."
        ) from error
    if len({*present}) > 1:
        calls = ", ".join(f"rank {rank} {called}" for rank, called in enumerate(present))
        raise TrainingError(
            f"the ranks have called different methods, each of which all ranks call together "
            f"({calls}); take what only some of them call out of `if "
            "trainer.is_world_process_zero()` and the like (rank 0 alone writes what is written "
            "once)."
        )


def tell_others(action: str) -> None:
    """Tell ranks that may wait for it, now or later, that rank 0 has done something alone.

    Args:
        action: the same text as of `wait_for_rank0`.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        with suppress(Exception):  # of a store that has ended: nobody waits any more
            store.connect().add(f"{_DONE}/{action}", 1)


def wait_for_rank0(action: str, times: int) -> None:
    """Wait until rank 0 has done something a number of times, or has ended its script.

    Args:
        action: as a noun and "to be" done.
        times: how often this rank has come to it, this time included.
    """
    peers = Peers(dist.get_world_size())
    with suppress(Exception), waiting(f"{action} by", (0,)):  # of a store that has ended
        own = store.connect()

        def is_done() -> bool:
            peers.read(own)
            return own.add(f"{_DONE}/{action}", 0) >= times or peers.has_left(0)

        until(is_done)


def _ranks_that_left() -> tuple[int, ...]:
    """The ranks whose scripts have ended."""
    peers = Peers(dist.get_world_size())
    ranks = range(dist.get_world_size())
    try:
        own = store.connect()

        def has_one_left() -> bool:
            peers.read(own)
            return any(peers.has_left(rank) for rank in ranks)

        until(has_one_left, _LEAVES_S)
    except Exception:  # of a store that has ended with its rank
        return ()
    return tuple(rank for rank in ranks if peers.has_left(rank))
