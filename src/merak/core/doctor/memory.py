"""Memory of the host and of the container, and the kernel's accounting of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from merak.core.doctor import cgroup
from merak.core.doctor.finding import Judgement, System, fine, problem, warning
from merak.core.units import counted, size

FEWEST_BYTES = 2**29
"""Memory of a rank that has imported torch and transformers, and has no model yet."""

LOW_BYTES = 2 * 2**30
"""Memory of a rank with a small model."""

STRICT = "2"
"""The kernel's mode that refuses memory that is reserved beyond a limit. Source: proc(5)."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory that ranks can take here.

    Args:
        host_bytes: of the host; 0 if unknown.
        available_bytes: that processes of the host can still take.
        limit_bytes: of the container; None without one.
        limit_free_bytes: that the container may still take; None without a limit.
        num_local_ranks: of the job on this host.
    """

    host_bytes: int
    available_bytes: int
    limit_bytes: int | None = None
    limit_free_bytes: int | None = None
    num_local_ranks: int = 1

    @property
    def free_bytes(self) -> int:
        """What processes can still take, of the host and of the container."""
        if self.limit_free_bytes is None:
            return self.available_bytes
        return min(self.available_bytes, self.limit_free_bytes)

    @property
    def whole_bytes(self) -> int:
        """The container's limit, or the host's memory where that is less; 0 if unknown."""
        if self.limit_bytes is None:
            return self.host_bytes
        return min(self.limit_bytes, self.host_bytes or self.limit_bytes)


@dataclass(frozen=True, slots=True)
class Overcommit:
    """The kernel's accounting of memory that is reserved.

    Args:
        mode: of vm.overcommit_memory; empty if unknown.
        free_bytes: that may still be reserved in the strict mode.
    """

    mode: str
    free_bytes: int = 0


def read_memory(system: System) -> Memory:
    """Read the memory of the host and the limit of the container.

    Args:
        system: where the kernel's files are.
    """
    found = _meminfo(system)
    return Memory(
        host_bytes=found.get("MemTotal", 0),
        available_bytes=found.get("MemAvailable", 0),
        limit_bytes=cgroup.limit(system, "memory.max"),
        limit_free_bytes=cgroup.free_memory(system),
        num_local_ranks=system.number("LOCAL_WORLD_SIZE", 1),
    )


def read_overcommit(system: System) -> Overcommit:
    """Read the kernel's accounting of reserved memory.

    Args:
        system: where the kernel's files are.
    """
    found = _meminfo(system)
    free = found.get("CommitLimit", 0) - found.get("Committed_AS", 0)
    return Overcommit(system.text("proc/sys/vm/overcommit_memory"), free)


def _meminfo(system: System) -> dict[str, int]:
    """Fields of proc's meminfo in bytes."""
    found = {}
    for line in system.text("proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdecimal():
            found[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return found


def check_memory(memory: Memory) -> Iterator[Judgement]:
    """Check the memory that is left for the ranks of this host."""
    if not memory.host_bytes:
        yield fine("unknown on this system")
        return
    free, found = memory.available_bytes, ""
    if memory.limit_bytes is not None and memory.limit_free_bytes is not None:
        free = min(free, memory.limit_free_bytes)
        found = f", of the {size(memory.limit_bytes)} that the container may have"
    found = f"{size(free)} are free{found}, on a host with {size(memory.host_bytes)}"
    ranks = memory.num_local_ranks
    beside = f"; {counted(ranks, 'rank')} of this host share that" if ranks > 1 else ""
    fix = "end other processes, start fewer ranks on this host" + (
        ", or raise the limit of the container" if memory.limit_bytes is not None else ""
    )
    if free < FEWEST_BYTES * ranks:
        yield problem(f"{found}{beside}; a rank without a model takes {size(FEWEST_BYTES)}", fix)
    elif free < LOW_BYTES * ranks:
        yield warning(f"{found}{beside}, which is little for a model", fix)
    else:
        yield fine(f"{found}{beside}")


def check_overcommit(own: Overcommit) -> Iterator[Judgement]:
    """Check that the kernel lets processes reserve more memory than they use."""
    if own.mode != STRICT:
        yield fine(f"vm.overcommit_memory={own.mode}" if own.mode else "unknown on this system")
        return
    found = (
        f"vm.overcommit_memory=2: the kernel refuses to reserve more than {size(own.free_bytes)}, "
        "but processes that use GPUs, or are forked, reserve far more than they use"
    )
    judge = problem if own.free_bytes < LOW_BYTES else warning
    yield judge(found, "as root, run `sysctl vm.overcommit_memory=0`")
