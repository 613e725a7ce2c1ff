"""Clocks of the hosts of a job, compared over the process group."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from merak.core.doctor.finding import Finding, Level
from merak.core.mesh import Mesh
from merak.core.units import seconds

ROUNDS = 8
"""Exchanges with each host, of which the fastest counts."""

MOST_S = 1.0
"""Difference of clocks above which logs and times of files of the hosts do not fit together."""

NAME = "clocks"


@dataclass(frozen=True, slots=True)
class Offset:
    """A host's clock against that of rank 0's host.

    Args:
        ahead_s: how far it is ahead; negative where it is behind.
        error_s: the most by which that may be wrong: half of the exchange.
    """

    ahead_s: float
    error_s: float


def clock_offsets(mesh: Mesh, hosts: Sequence[str]) -> dict[str, Offset]:
    """Compare the clock of each host with that of rank 0's host; all ranks call it together.

    Args:
        mesh: of the ranks.
        hosts: of each rank.

    Returns:
        By host, on rank 0; nothing on other ranks.
    """
    found = {}
    for host in dict.fromkeys(hosts):
        rank = hosts.index(host)
        if rank and mesh.rank == 0:
            found[host] = fastest([_exchange(rank) for _ in range(ROUNDS)])
        elif rank and mesh.rank == rank:
            for _ in range(ROUNDS):
                _answer()
    return found


def fastest(exchanges: Sequence[tuple[float, float, float]]) -> Offset:
    """Estimate an offset from exchanges: the fastest one says most.

    Args:
        exchanges: seconds when a question left, the other clock's answer, and when it came.

    Source: the clock filter of NTP (RFC 5905, section 10).
    """
    left_s, there_s, back_s = min(exchanges, key=lambda one: one[2] - one[0])
    return Offset(there_s - (left_s + back_s) / 2, (back_s - left_s) / 2)


def _exchange(rank: int) -> tuple[float, float, float]:
    message = _message()
    left_s = time.time()
    dist.send(message, rank)
    dist.recv(message, rank)
    return left_s, float(message), time.time()


def _answer() -> None:
    message = _message()
    dist.recv(message, 0)
    dist.send(message.fill_(time.time()), 0)


def _message() -> torch.Tensor:
    """A number that travels between hosts' memories: a receive then keeps the host waiting."""
    return torch.zeros(1, dtype=torch.float64, device="cpu")


def judge_clocks(offsets: Mapping[str, Offset], hosts: Sequence[str]) -> list[Finding]:
    """Judge the differences of clocks.

    Args:
        offsets: of each host but rank 0's.
        hosts: of each rank.
    """
    if not offsets:
        return [Finding(NAME, Level.OK, "one host, one clock")]
    wrong = [
        Finding(
            NAME,
            Level.WARNING,
            f"the clock of {host} is {seconds(abs(own.ahead_s))} "
            f"{'ahead of' if own.ahead_s > 0 else 'behind'} that of {hosts[0]}",
            f"let {host} set its clock over the network (timedatectl set-ntp true, or chrony)",
        )
        for host, own in offsets.items()
        if abs(own.ahead_s) - own.error_s > MOST_S
    ]
    most = max(abs(own.ahead_s) + own.error_s for own in offsets.values())
    return wrong or [Finding(NAME, Level.OK, f"all hosts within {seconds(most)}")]
