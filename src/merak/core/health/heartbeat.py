"""Heartbeats of ranks in the job's store, and the state of ranks whose heartbeat has stopped.

Each rank's watchdog writes its process and its status every few seconds. A rank whose heartbeat
stops was killed, was stopped, has left, or cannot be reached; a rank on the same machine reads
which from the process table, and publishes it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

from torch.distributed.distributed_c10d import Store

PREFIX = "merak/heartbeat"
"""Prefix of the store's keys of heartbeats."""

GLOO = "GLOO_SOCKET_IFNAME"
INTERFACES = (GLOO, "NCCL_SOCKET_IFNAME")
"""Environment variables that name the network interfaces of ranks."""

LOCAL_ONLY = ", which only that host itself can reach"

ENDED = "X"


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Heartbeat of a rank: its process, its phase and what it waits for.

    Args:
        count: number of heartbeats so far.
        host: the name of its machine.
        machine: identity of the machine and of its process table.
        pid: its process.
        started: start time of that, in the process table's own unit.
        address: at which other ranks reach it.
        doing: its status, the rest of a sentence that begins with the rank.
        busy_s: seconds of the phase that other ranks may have to wait for; None outside of phases.
        waits_for_nobody: whether it works in a phase, or is outside of phases.
        has_left: whether its script has ended.
    """

    count: int
    host: str
    machine: str
    pid: int
    started: str
    address: str
    doing: str = ""
    busy_s: float | None = None
    waits_for_nobody: bool = False
    has_left: bool = False

    def write(self, store: Store, rank: int) -> None:
        """Write the heartbeat to the job's store."""
        store.set(f"{PREFIX}/{rank}", json.dumps(asdict(self)))


def own_heartbeat() -> Heartbeat:
    """Make the first heartbeat of this process."""
    pid = os.getpid()
    return Heartbeat(0, socket.gethostname(), machine(), pid, _process(pid)[1], own_address())


@cache
def machine() -> str:
    """Return the identity of this machine and of its process table."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"{socket.gethostname()} {os.uname().version}"


@cache
def own_address() -> str:
    """Return this rank's address: of the named interface, or of the host's name."""
    for variable in INTERFACES:
        if os.environ.get(variable):
            return f"{variable}={os.environ[variable]}"
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "a name without an address"


def _process(pid: int) -> tuple[str, str, int]:
    """Return a process's state as of proc(5), start time, and exit status as of waitpid(2)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ENDED, "", 0
    fields = text[text.rindex(")") + 2 :].split()
    return fields[0], fields[19], int(fields[-1])


class Peers:
    """Last heartbeats of all ranks, as one rank has read them.

    Args:
        num_ranks: of the job.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        # Per rank, its last heartbeat and when that was first seen, on perf_counter's clock.
        self._found: dict[int, tuple[Heartbeat, float]] = {}
        self._beaten: set[int] = set()

    @property
    def are_known(self) -> bool:
        """Whether there is a heartbeat of every rank."""
        return len(self._found) == self.num_ranks

    def read(self, store: Store) -> None:
        """Read the heartbeats in the store."""
        ranks = range(self.num_ranks)
        new = [r for r in ranks if r not in self._found]
        if new and store.check([f"{PREFIX}/{rank}" for rank in new]):
            there = list(ranks)
        else:
            heard = {r for r in new if store.check([f"{PREFIX}/{r}"])} | self._found.keys()
            there = sorted(heard)
        if not there:
            return
        texts = store.multi_get([f"{PREFIX}/{rank}" for rank in there])
        now = time.perf_counter()
        for rank, text in zip(there, texts, strict=True):
            beat = Heartbeat(**json.loads(text))
            if rank not in self._found:
                self._found[rank] = (beat, now)
            elif self._found[rank][0].count != beat.count:
                self._found[rank] = (beat, now)
                self._beaten.add(rank)

    def has_beaten(self, rank: int) -> bool:
        """Whether a rank's heartbeat has changed between the first reading and the last."""
        return rank in self._beaten

    def has_left(self, rank: int) -> bool:
        """Whether a rank's script has ended, by its last heartbeat."""
        beat = self.get(rank)
        return beat is not None and beat.has_left

    def is_not_waiting(self, rank: int) -> bool:
        """Whether a rank waits for no other rank, as far as is known."""
        beat = self.get(rank)
        return beat is None or beat.waits_for_nobody

    def doing(self, rank: int) -> str:
        """Describe a rank's phase and wait, as the rest of a sentence that begins with the rank."""
        beat = self.get(rank)
        return "has not been heard of" if beat is None else beat.doing

    def get(self, rank: int) -> Heartbeat | None:
        """Return a rank's last heartbeat; None if there was none."""
        return self._found[rank][0] if rank in self._found else None

    def silent_s(self, rank: int) -> float:
        """Return the seconds since a rank's last heartbeat was first read; infinite for none."""
        if rank not in self._found:
            return float("inf")
        return time.perf_counter() - self._found[rank][1]

    def busy_s(self, rank: int) -> float | None:
        """Return the seconds of a rank's phase that others wait for; None outside of phases."""
        beat = self.get(rank)
        if beat is None or beat.busy_s is None or beat.has_left:
            return None
        return beat.busy_s + self.silent_s(rank)

    def fates(self, ranks: Iterable[int]) -> dict[int, str]:
        """Find ranks of this machine in its process table that have ended or are stopped."""
        found = {}
        for rank in ranks:
            beat = self.get(rank)
            fate = None if beat is None else _fate_here(beat)
            if fate is not None:
                found[rank] = fate
        return found

    def describe(self, rank: int, fates: Mapping[int, str]) -> str:
        """Describe in a clause why a rank may not answer.

        Args:
            rank: which one.
            fates: ends of processes, as ranks on the same machines have found them.
        """
        beat = self.get(rank)
        if beat is None:
            return (
                f"rank {rank} has not been heard of: merak.init was not called there, or its host "
                "cannot reach the job's store"
            )
        who = f"rank {rank} (process {beat.pid} on {beat.host})"
        silent_s = f"{self.silent_s(rank):.0f} s"
        last = f"; {silent_s} ago it said that it {beat.doing}" if beat.doing else ""
        if beat.has_left:
            return f"{who} has left the job, since its script has ended"
        if rank in fates:
            return f"{who} {fates[rank]}{last}"
        if beat.machine == machine():
            return f"{who} lives, but says nothing for {silent_s}{last}"
        return (
            f"{who} says nothing for {silent_s}, so it has ended or been stopped, "
            f"or its host, {beat.address}, cannot be reached{last}"
        )

    def addresses(self) -> str:
        """List the hosts of the job with their addresses, for a sentence."""
        hosts = sorted({(b.host, b.address) for b, _ in self._found.values()})
        are_several = len({b.machine for b, _ in self._found.values()}) > 1
        return ", ".join(
            f"{host} ({address}{LOCAL_ONLY if are_several and address.startswith('127.') else ''})"
            for host, address in hosts
        )


def _fate_here(beat: Heartbeat) -> str | None:
    """Describe how a process of this machine has ended; None if it lives, or is of another one."""
    if beat.machine != machine() or beat.has_left or not Path("/proc/self/stat").exists():
        return None
    state, started, status = _process(beat.pid)
    if state in "Tt" and started == beat.started:
        return "is stopped, as by SIGSTOP, Ctrl-Z or a debugger"
    if started != beat.started or state in "XxZ":
        number = status & 0x7F if state == "Z" else 0
        if number == signal.SIGKILL:
            return "was killed by SIGKILL, perhaps by the kernel for its memory"
        if number:
            return f"was killed by {signal.Signals(number).name}"
        if state == "Z" and status:
            return f"has ended with exit code {status >> 8}"
        return "has ended without a word: it was killed, perhaps for its memory, or left"
    return None


def network_hint(peers: Peers) -> str:
    """Advise in a sentence what to set where ranks live and cannot reach one another."""
    used = [f"{name}={os.environ[name]}" for name in INTERFACES if os.environ.get(name)]
    now = f" (now {', '.join(used)})" if used else ""
    return (
        f"The ranks live but cannot reach one another at {peers.addresses()}: set "
        f"{' and '.join(INTERFACES)}{now} to the interface that joins the hosts, and let no "
        "firewall stand between them."
    )


def why_lost(rank: int, peers: Peers, reason: str) -> str:
    """Explain a lost connection in a sentence.

    Args:
        rank: this rank.
        peers: heartbeats, read twice with a pause between.
        reason: torch's message about the connection.
    """
    others = [other for other in range(peers.num_ranks) if other != rank]
    fates = peers.fates(others)
    gone = [r for r in others if r in fates or peers.has_left(r) or not peers.has_beaten(r)]
    if gone:
        found = "; ".join(peers.describe(other, fates) for other in gone)
        return f"{found}; so rank {rank} cannot go on ({reason})."
    busy = [r for r in others if peers.busy_s(r) is not None]
    if "timed out" in reason.lower() and busy:
        doing = "; ".join(f"rank {r} {peers.doing(r)}" for r in busy)
        return f"rank {rank} has waited too long ({reason}): {doing}; raise hang_limit_s."
    return f"rank {rank} has lost the connection to another rank ({reason}). {network_hint(peers)}"


def ended(beat: Heartbeat) -> Heartbeat:
    """Make the last heartbeat of a rank whose script ends."""
    return replace(beat, count=beat.count + 1, has_left=True)
