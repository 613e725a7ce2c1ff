"""Agreement of ranks on the attempt: the number of a start of the job, the same on every host.

torchrun starts the ranks of a job again after a fault, while the store that its agent keeps still
holds the keys of earlier attempts: addresses of ranks that have ended, a failure that was reported.
So all keys of an attempt get a prefix. TORCHELASTIC_RESTART_COUNT cannot make it: where one of two
hosts fails, only that host's agent counts. Ranks agree through the store itself:

- rank 0 takes the next number, which no other process has had;
- every other rank writes a nonce, and rank 0 answers each nonce with the number;
- a rank that finds an answer to its own nonce confirms it, and rank 0 waits for all of them.

A nonce is of one process, so no rank can take an answer that was meant for an earlier attempt; an
agent starts ranks only after those of the attempt before have ended, so no earlier rank 0 answers.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Protocol, cast

from torch.distributed.distributed_c10d import Store as AnyStore

from merak.core.errors import MeshError
from merak.core.health.status import named

NUMBER = "merak/attempt"
"""Store key of the number of attempts so far."""

NONCES = f"{NUMBER}/nonces"
ANSWER = f"{NUMBER}/answer"
JOINED = f"{NUMBER}/joined"


class Store(Protocol):
    """Part of torch's store that ranks agree through; its own stubs lack some of it."""

    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 at first, and return it."""

    def get(self, key: str) -> bytes:
        """Return a key's value, once there is one."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys have values."""

    def append(self, key: str, value: str) -> None:
        """Append to a key's value."""

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        """Set several keys at once."""


_SHORTEST_S, _LONGEST_S = 0.01, 0.5


def agree_on_attempt(store: AnyStore, rank: int, num_ranks: int, limit_s: float) -> int:
    """Agree with all other ranks on the number of this attempt; all call it together.

    Args:
        store: that of the job, which may hold keys of earlier attempts.
        rank: this rank.
        num_ranks: how many there are.
        limit_s: seconds to wait for the others.

    Raises:
        MeshError: a rank has not come within the limit.
    """
    known = cast(Store, store)
    if rank == 0:
        return _lead(known, num_ranks, limit_s)
    return _follow(known, rank, limit_s)


def _lead(store: Store, num_ranks: int, limit_s: float) -> int:
    """Take a new number, and answer nonces with it until every other rank has confirmed it."""
    number = store.add(NUMBER, 1)
    joined = f"{JOINED}/{number}"
    store.append(joined, "0\n")
    store.append(NONCES, f"{uuid.uuid4().hex}\n")
    answered: set[str] = set()
    for _ in _polls(limit_s):
        new = set(_lines(store, NONCES)) - answered
        if new:
            store.multi_set([f"{ANSWER}/{nonce}" for nonce in new], [str(number)] * len(new))
            answered |= new
        missing = set(range(num_ranks)) - {int(line) for line in _lines(store, joined)}
        if not missing:
            return number
    raise MeshError(
        f"rank 0 has waited {limit_s:g} s for {named(tuple(sorted(missing)))} to join the job: "
        "merak.init was not called there, or later than that, or the host cannot reach the job's "
        "store; let all ranks call it, or raise its timeout_s."
    )


def _follow(store: Store, rank: int, limit_s: float) -> int:
    nonce = uuid.uuid4().hex
    store.append(NONCES, f"{nonce}\n")
    for _ in _polls(limit_s):
        if store.check([f"{ANSWER}/{nonce}"]):
            number = int(store.get(f"{ANSWER}/{nonce}"))
            if number == store.add(NUMBER, 0):  # else a former rank 0's, cut off from its agent
                store.append(f"{JOINED}/{number}", f"{rank}\n")
                return number
    raise MeshError(
        f"rank {rank} has waited {limit_s:g} s for rank 0 to join the job: merak.init was not "
        "called there, or later than that, or the host cannot reach the job's store; let all "
        "ranks call it, or raise its timeout_s."
    )


def _lines(store: Store, key: str) -> list[str]:
    """Read the lines that processes have appended to a key, which must exist."""
    return store.get(key).decode().splitlines()


def _polls(limit_s: float) -> Iterator[None]:
    """Iterate until a limit, each time after a longer pause; at least once."""
    deadline, pause_s = time.monotonic() + limit_s, _SHORTEST_S
    yield
    while time.monotonic() < deadline:
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _LONGEST_S)
        yield
