"""Limits of the system on this process: files, locked memory, processes, shared memory."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from traceback import walk_tb

from merak.core.doctor import cgroup
from merak.core.doctor.finding import Judgement, System, fine, problem, warning
from merak.core.units import size

FEWEST_FILES = 256
"""Open files with which a rank cannot run: libraries, data and sockets take some two hundred."""

FILES, FILES_A_RANK = 512, 8
"""Open files for a rank itself, and for each other rank of the job: a socket a process group."""

FEWEST_PROCESSES, PROCESSES = 256, 2048
"""Processes and threads with which a rank cannot run, and that a host's ranks have easily."""

LOCKED_BYTES = 2**30
"""Locked memory that transfers over InfiniBand may take."""

LOW_SHARED_BYTES = 64 * 2**20
"""Shared memory that Docker gives a container by default."""

FEWEST_SHARED_BYTES = 16 * 2**20
"""Free shared memory below which not even NCCL's own buffers fit."""


MORE_FILES = "run `ulimit -n 65536` before the job (in Docker, --ulimit nofile=65536:65536)"
MORE_PROCESSES = "run `ulimit -u 65536` before the job (in Docker, --pids-limit -1)"
MORE_SHARED = "start the container with more (docker run --shm-size=8g, or --ipc=host)"


@dataclass(frozen=True, slots=True)
class Limits:
    """Soft limits of this process; None for unlimited.

    Args:
        open_files: number of files and sockets.
        locked_bytes: of memory that may not be swapped out.
        processes: number of processes and threads of this user, or of the container.
        address_bytes: of address space.
        infiniband: names of InfiniBand devices.
        num_ranks: of the job.
    """

    open_files: int | None = None
    locked_bytes: int | None = None
    processes: int | None = None
    address_bytes: int | None = None
    infiniband: tuple[str, ...] = ()
    num_ranks: int = 1


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """The file system of shared memory.

    Args:
        total_bytes: of it; None where there is none.
        free_bytes: of it.
    """

    total_bytes: int | None
    free_bytes: int = 0


def read_limits(system: System) -> Limits:
    """Read the limits of this process and of its container.

    Args:
        system: whose files and environment are read.
    """
    own = [
        limit for limit in (_soft(resource.RLIMIT_NPROC), cgroup.limit(system, "pids.max")) if limit
    ]
    devices = system.root / "sys/class/infiniband"
    return Limits(
        open_files=_soft(resource.RLIMIT_NOFILE),
        locked_bytes=_soft(resource.RLIMIT_MEMLOCK),
        processes=min(own, default=None),
        address_bytes=_soft(resource.RLIMIT_AS),
        infiniband=tuple(sorted(path.name for path in devices.glob("*"))),
        num_ranks=system.number("WORLD_SIZE", 1),
    )


def _soft(which: int) -> int | None:
    found = resource.getrlimit(which)[0]
    return None if found == resource.RLIM_INFINITY else found


def read_shared_memory(system: System) -> SharedMemory:
    """Read the size of shared memory.

    Args:
        system: whose dev/shm it is.
    """
    try:
        found = os.statvfs(system.root / "dev/shm")
    except OSError:
        return SharedMemory(None)
    return SharedMemory(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


def check_open_files(limits: Limits) -> Iterator[Judgement]:
    """Check the limit on open files and sockets."""
    most, needed = limits.open_files, FILES + FILES_A_RANK * limits.num_ranks
    fix = MORE_FILES
    if most is None or most >= needed:
        yield fine("unlimited" if most is None else f"{most:,} open files")
    elif most < FEWEST_FILES:
        yield problem(f"{most:,} open files are too few for one rank", fix)
    else:
        yield warning(
            f"{most:,} open files are few for a job of {limits.num_ranks:,} ranks, which may open "
            f"{needed:,}: it would end with “Too many open files”",
            fix,
        )


def check_locked_memory(limits: Limits) -> Iterator[Judgement]:
    """Check the limit on locked memory, which InfiniBand needs."""
    most = limits.locked_bytes
    shown = "unlimited" if most is None else size(most)
    if limits.infiniband and most is not None and most < LOCKED_BYTES:
        yield warning(
            f"{shown} of locked memory, but NCCL locks its buffers for InfiniBand "
            f"({', '.join(limits.infiniband)})",
            "run `ulimit -l unlimited` before the job (in Docker, --ulimit memlock=-1)",
        )
    else:
        yield fine(shown if limits.infiniband else f"{shown}; the host has no InfiniBand")


def check_processes(limits: Limits) -> Iterator[Judgement]:
    """Check the limits on processes and threads, and on the address space of one."""
    most = limits.processes
    fix = MORE_PROCESSES
    if most is not None and most < FEWEST_PROCESSES:
        yield problem(f"{most:,} processes and threads are too few for one rank", fix)
    elif most is not None and most < PROCESSES:
        yield warning(
            f"{most:,} processes and threads are few: each rank and each worker of a data loader "
            "has dozens",
            fix,
        )
    elif limits.address_bytes is None:
        yield fine("unlimited" if most is None else f"{most:,} processes and threads")
    if limits.address_bytes is not None:
        yield warning(
            f"the address space of a process is limited to {size(limits.address_bytes)}; torch and "
            "CUDA reserve many times the memory that they use",
            "run `ulimit -v unlimited` before the job",
        )


def check_shared_memory(shared: SharedMemory) -> Iterator[Judgement]:
    """Check the size of shared memory, which NCCL and workers of data loaders need."""
    fix = MORE_SHARED
    if shared.total_bytes is None:
        yield warning("there is no /dev/shm, which NCCL and data loaders use", fix)
        return
    found = f"{size(shared.free_bytes)} of {size(shared.total_bytes)} are free in /dev/shm"
    if shared.free_bytes < FEWEST_SHARED_BYTES:
        yield problem(
            f"{found}; ranks of a host exchange tensors there",
            f"{fix}; remove what ended jobs have left there",
        )
    elif shared.total_bytes <= LOW_SHARED_BYTES:
        yield warning(
            f"{found}, Docker's default; workers of data loaders end with a bus error when it is "
            "full",
            fix,
        )
    else:
        yield fine(found)


_SHARED = ("bus error", "shared memory", "</torch_", "/dev/shm")
_STARTING_MODULES = ("multiprocessing", "torch.multiprocessing", "subprocess", "threading")
_SHARED_MODULES = ("multiprocessing", "torch.multiprocessing", "torch.utils.data")


def exhausted(error: BaseException, system: System | None = None) -> str | None:
    """Limit of the system that an exception is about, with how to raise it, as a sentence.

    Args:
        error: of any library; those that it was raised from are looked at, too.
        system: whose limits are read; by default this process and its host.

    Returns:
        A sentence; None for another exception.
    """
    of = system or System()
    for one in _chain(error):
        number, text = getattr(one, "errno", None), str(one).lower()
        if number in (errno.EMFILE, errno.ENFILE) or "too many open files" in text:
            most = read_limits(of).open_files
            may = "no more files" if most is None else f"{most:,} open files at most"
            return f"a process here may have {may}, and this one needs more; {MORE_FILES}."
        cannot_fork = number == errno.EAGAIN and _module(one).startswith(_STARTING_MODULES)
        if cannot_fork or "can't start new thread" in text:
            most = read_limits(of).processes
            limit = "" if most is None else f" ({most:,} are allowed)"
            return f"no further process or thread can be started here{limit}; {MORE_PROCESSES}."
        is_full = number == errno.ENOSPC and _module(one).startswith(_SHARED_MODULES)
        if is_full or any(word in text for word in _SHARED):
            found = read_shared_memory(of)
            total, free = size(found.total_bytes or 0), size(found.free_bytes)
            return (
                "the shared memory that workers of a data loader and ranks of a host exchange "
                f"tensors in is full: {free} of {total} are free in /dev/shm; {MORE_SHARED}, or "
                "use dataloader_num_workers=0."
            )
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception and those that it was raised from."""
    found: BaseException | None = error
    for _ in range(20):
        if found is None:
            return
        yield found
        found = found.__cause__ or found.__context__


def _module(error: BaseException) -> str:
    """Module of the innermost Python frame of an exception."""
    names = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    return names[-1] if names else ""
