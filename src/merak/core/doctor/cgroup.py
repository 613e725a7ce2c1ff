"""Limits of the container (control groups of the kernel, versions 1 and 2)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from merak.core.doctor.finding import System

UNLIMITED = 2**60
"""Numbers from here on stand for no limit in version 1."""

_MOUNT = "sys/fs/cgroup"

_FORMER = {
    "memory.max": ("memory", "memory.limit_in_bytes"),
    "memory.current": ("memory", "memory.usage_in_bytes"),
    "memory.stat": ("memory", "memory.stat"),
    "pids.max": ("pids", "pids.max"),
    "cpu.max": ("cpu", "cpu.cfs_quota_us"),
}
"""File of version 2 → controller and file of version 1."""


def folders(system: System, file: str) -> Iterator[str]:
    """Yield the folders of this process's control groups that have a file, innermost first.

    Args:
        system: where the kernel's files are.
        file: name of version 2, such as "memory.max".

    Yields:
        Paths of the file itself, below the root.
    """
    controller, former = _FORMER[file]
    for line in system.text("proc/self/cgroup").splitlines():
        _, controllers, place = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top, name = (f"{_MOUNT}/{controller}", former) if controllers else (_MOUNT, file)
        own = PurePosixPath(place.lstrip("/"))
        for folder in (own, *own.parents):
            path = str(PurePosixPath(top) / folder / name)
            if system.text(path):
                yield path


def limit(system: System, file: str) -> int | None:
    """Return the smallest limit of all groups that this process is in; None for none.

    Args:
        system: where the kernel's files are.
        file: name of version 2, of a file with one number.
    """
    values = [system.text(path) for path in folders(system, file)]
    numbers = [int(value) for value in values if value.isdecimal()]
    return min((number for number in numbers if number < UNLIMITED), default=None)


def free_memory(system: System) -> int | None:
    """Return the bytes that this process's container may still take; None without a limit.

    Args:
        system: where the kernel's files are.
    """
    free = []
    for path in folders(system, "memory.max"):
        most = system.text(path)
        if not most.isdecimal() or int(most) >= UNLIMITED:
            continue
        is_former = path.endswith(_FORMER["memory.max"][1])
        folder = path.rpartition("/")[0]
        used = system.text(
            f"{folder}/{_FORMER['memory.current'][1] if is_former else 'memory.current'}"
        )
        if used.isdecimal():
            free.append(int(most) - int(used) + _reclaimable(system.text(f"{folder}/memory.stat")))
    return min(free, default=None)


def _reclaimable(statistics: str) -> int:
    """Bytes of files that are cached and can be dropped at once."""
    for line in statistics.splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file") and value.isdecimal():
            return int(value)
    return 0


def processors(system: System) -> float | None:
    """Return the number of processors whose time the container may take; None without a limit.

    Args:
        system: where the kernel's files are.
    """
    found = []
    for path in folders(system, "cpu.max"):
        if path.endswith("cpu.max"):
            quota, _, period = system.text(path).partition(" ")
        else:
            quota = system.text(path)
            period = system.text(f"{path.rpartition('/')[0]}/cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal() and int(period):
            found.append(int(quota) / int(period))
    return min(found, default=None)
