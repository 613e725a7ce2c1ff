"""Processors that this process may use, and the threads that ranks compute with."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass

from merak.core.doctor import cgroup
from merak.core.doctor.finding import Judgement, System, fine, warning
from merak.core.units import counted

THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True, slots=True)
class Processors:
    """Processors and threads.

    Args:
        host: logical processors of the host.
        own: that this process may run on.
        quota: processors whose time the container may take; None without a limit.
        threads: OMP_NUM_THREADS as it is set; empty where it is not.
        num_local_ranks: of the job on this host.
    """

    host: int
    own: int
    quota: float | None = None
    threads: str = ""
    num_local_ranks: int = 1

    @property
    def usable(self) -> int:
        """Processors that this process can use at the same time."""
        return self.own if self.quota is None else max(1, min(self.own, math.ceil(self.quota)))


def read_processors(system: System) -> Processors:
    """Read the processors of this process.

    Args:
        system: whose files and environment are read.
    """
    host = os.cpu_count() or 1
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else host
    return Processors(
        host=host,
        own=own,
        quota=cgroup.processors(system),
        threads=system.environment.get(THREADS, ""),
        num_local_ranks=system.number("LOCAL_WORLD_SIZE", 1),
    )


def check_processors(own: Processors) -> Iterator[Judgement]:
    """Check that the ranks of the host do not share processors."""
    ranks, found = own.num_local_ranks, f"{counted(own.usable, 'processor')}"
    if own.usable < own.host:
        why = "bound to them" if own.usable == own.own else "limited by the container"
        found += f" of the host's {own.host:,} ({why})"
    # A rank may be bound to processors of its own: then the others have the rest of the host.
    together = own.host if own.quota is None else own.usable
    if ranks > together:
        yield warning(
            f"{found} for {counted(ranks, 'rank')}: they wait for one another",
            "start at most one rank for each processor",
        )
        return
    threads = own.threads.split(",")[0].strip()
    if own.threads and not (threads.isdecimal() and int(threads)):
        yield warning(
            f"{THREADS}={own.threads} is no number of threads",
            f"set {THREADS} to {max(1, together // ranks)}, or unset it",
        )
    elif own.threads and (int(threads) * ranks > together or int(threads) > own.usable):
        each = f" for each of {ranks:,} ranks" if ranks > 1 else ""
        yield warning(
            f"{THREADS}={own.threads}{each}, but {found}: threads wait for one another",
            f"set {THREADS}={max(1, min(own.usable, together // ranks))}",
        )
    else:
        shown = f"; {THREADS}={own.threads}" if own.threads else ""
        yield fine(f"{found}{shown}")
