"""Watchdog of hangs: when a rank waits too long, every rank prints its status and the job ends.

A watchdog runs on each rank from `merak.init` to its end, in two threads. One measures how long the
rank has waited for others: in the engine's steps, or outside them by `merak.core.health.status`.
The other exchanges heartbeats through the job's store. The first rank that has waited longer than
the limit writes this there; the watchdogs of the other ranks read it, and each prints the status of
its own rank, also while its main thread blocks in a transfer or sleeps in the user's code. Then one
rank prints the reason, and all of them end. A rank that prints nothing, because it was stopped or
has ended, is named with its last heartbeat; where the store itself has gone, each rank ends at its
own limit.

A rank may trace, load or save for minutes while others wait: as long as its heartbeat goes on, they
wait several times the limit.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from merak.core.errors import TrainingError
from merak.core.health import failure, preemption, store
from merak.core.health.heartbeat import (
    INTERFACES,
    Heartbeat,
    Peers,
    ended,
    network_hint,
    own_address,
    own_heartbeat,
    why_lost,
)
from merak.core.health.status import Report, named, report
from merak.core.health.stderr import write_line
from merak.core.health.timeouts import extend_timeouts, until
from merak.core.source_lines import users_line

HANG = "merak/hang"
"""Store key of the rank that has waited too long; keys below it hold the status of ranks."""

GRACE_S = 10.0
"""Seconds that the ranks get to publish their status."""

LINGER_S = 1.0
"""Seconds that rank 0 stays after the report: without torchrun it keeps the store of the job."""

NOTICE_S = 60.0
"""Seconds after which one of the ranks that wait logs it, and again after twice as many."""

PATIENCE = 3.0
"""Multiple of the limit that ranks wait for one in a phase, such as saving, that is alive."""

MOST_NAMED = 4
"""Number of ranks that a notice describes."""

JOINING = "the connection to"
"""Object of the wait of ranks that join the job."""

_MAX_INTERVAL_S = 2.0
_CONNECTION_S = 5.0
_LEAVE_S = 4 * store.ANSWER_S
"""Seconds that a thread may take to end: longer than it waits for a store that is gone, since
Python aborts where it is in torch's code meanwhile."""

Reporter = Callable[[], Report | None]
"""Reporter of a rank's status, such as its engine; None while it does nothing."""


@dataclass(frozen=True, slots=True)
class Member:
    """Rank of a job, as the watchdog names it.

    Args:
        rank: its number.
        num_ranks: how many there are.
        place: its coordinates in the mesh.
    """

    rank: int
    num_ranks: int
    place: str


@dataclass(frozen=True, slots=True)
class Limit:
    """Limit on the time of a wait, and the argument that sets it.

    Args:
        name: of the argument.
        seconds: its value.
    """

    name: str
    seconds: float


@dataclass(slots=True)
class _HangState:
    """State of a hang of the job as far as this rank knows it, shared by its threads."""

    # Another rank has waited too long.
    is_known: bool = False
    # Status of each rank, as far as the store has it.
    lines: dict[int, dict[str, Any]] | None = None
    reason_given: bool = False


class Watchdog:
    """Watchdog of one rank: two threads, from `start` to `stop`.

    Args:
        member: the rank.
        limit: how long it waits.
    """

    def __init__(self, member: Member, limit: Limit) -> None:
        self.limit = limit
        self._member = member
        self._reporters: list[Reporter] = []
        self._report = report()
        self._beat: Heartbeat = own_heartbeat()
        self._peers = Peers(member.num_ranks)
        self._last_read = 0.0
        # Until when another rank's phase was a reason to wait.
        self._excused_at = 0.0
        self._next_notice_s = NOTICE_S
        self._hang = _HangState()
        # A plain flag: a lock might be held when a data loader forks.
        self._is_stopped = False
        self._is_leaving = threading.Event()
        self._threads: list[threading.Thread] = []
        self._store: Store | None = None

    def start(self) -> None:
        """Start both threads; the job's store must be reachable."""
        self._threads = [
            threading.Thread(target=work, daemon=True, name="merak watchdog")
            for work in (self._watch, self._listen)
        ]
        for thread in self._threads:
            thread.start()
        failure.explain_lost_connections(self._why_lost)
        pid = os.getpid()
        # A thread in torch's own code when Python ends would abort the process.
        atexit.register(lambda: self.join() if os.getpid() == pid else None)

    def move(self, place: str) -> None:
        """Name other coordinates of the rank from now on."""
        self._member = replace(self._member, place=place)

    def add(self, reporter: Reporter) -> None:
        """Add a reporter of this rank's status, ahead of those added earlier."""
        self._reporters.insert(0, reporter)

    def remove(self, reporter: Reporter) -> None:
        """Stop watching a reporter of progress."""
        if reporter in self._reporters:
            self._reporters.remove(reporter)

    def stop(self) -> None:
        """Tell the threads to end."""
        self._is_stopped = True
        self._is_leaving.set()

    def join(self) -> None:
        """Stop, and wait until the threads have ended."""
        self.stop()
        for thread in self._threads:
            thread.join(_LEAVE_S)

    @property
    def _interval_s(self) -> float:
        return min(_MAX_INTERVAL_S, self.limit.seconds / 5)

    # ---- this rank ----

    def _watch(self) -> None:
        job, known = None, 0
        while not self._is_stopped:
            if dist.is_initialized():
                job = job or dist.group.WORLD
                if dist.group.WORLD is not job:
                    return
                known = extend_timeouts(timeouts_s(self.limit), known)
            elif job is not None:
                return
            self._report = self._current()
            if self._hang.is_known or self._is_overdue():
                self._end()
            self._is_leaving.wait(self._interval_s)

    def _current(self) -> Report:
        for reporter in list(self._reporters):
            found = reporter()
            if found is not None:
                return found
        return report()

    def _is_overdue(self) -> bool:
        found, limit_s = self._report, self.limit.seconds
        others = range(self._member.num_ranks)
        busy = [self._peers.busy_s(r) for r in others if self._peers.silent_s(r) < limit_s]
        if any(busy_s is not None and busy_s < PATIENCE * limit_s for busy_s in busy):
            self._excused_at = time.perf_counter()
        if found.is_timed:
            return min(found.for_s, time.perf_counter() - self._excused_at) > limit_s
        return found.is_busy and any(self._is_silent(rank) for rank in others)

    def _is_silent(self, rank: int) -> bool:
        """Whether the heartbeat of a rank has stopped for longer than the limit."""
        beat = self._peers.get(rank)
        if beat is None or beat.has_left or rank == self._member.rank:
            return False
        # Heartbeats that were read long ago, while nothing was waited for, are no evidence.
        was_read = time.perf_counter() - self._last_read < self.limit.seconds / 2
        return was_read and self._peers.silent_s(rank) > self.limit.seconds + 2 * self._interval_s

    def _end(self) -> None:
        """Print this rank's status, let one rank print the reason, and end the process."""
        try:
            self._report_hang()
        except Exception:  # the process must end, whatever cannot be printed
            traceback.print_exc()
        if self._member.rank == 0:
            time.sleep(LINGER_S)
        os._exit(1)

    def _report_hang(self) -> None:
        found = self._current()
        line = self._line(found)
        _print(line)
        waits = found.waits if found.is_timed else ""
        reason = waits or "has found a rank that says nothing"
        if self._hang.is_known:
            reason = waits or "was told of a rank that waits"
        publisher = threading.Thread(target=self._publish, args=(line, waits, reason), daemon=True)
        publisher.start()
        publisher.join(GRACE_S + 3 * _CONNECTION_S)
        self._print_reason(reason)

    def _line(self, found: Report) -> str:
        frames = sys._current_frames()
        main = frames.get(threading.main_thread().ident or 0)
        place = users_line(traceback.extract_stack(main)) if main is not None else ""
        who = f"rank {self._member.rank} ({self._member.place}, {self._beat.host})"
        return f"merak: {who} {found.doing}" + (f" [{place}]" if place else "")

    # ---- all ranks ----

    def _listen(self) -> None:
        """Exchange heartbeats through the store until another rank has reported a hang."""
        with suppress(Exception):  # a store that is gone: then each rank has its own limit
            # Both while the store is there: one may have to wait in it when the other must not.
            self._store, own = store.connect(), store.connect()
            while not self._is_stopped and not self._hang.is_known:
                self._publish_heartbeat(own)
                self._read_peers(own)
                self._log_notice(own)
                preemption.look(own)
                self._hang.is_known = own.check([HANG])
                self._is_leaving.wait(self._interval_s)
            if self._is_stopped:
                ended(self._beat).write(own, self._member.rank)

    def _publish_heartbeat(self, own: Store) -> None:
        found = self._current()
        self._beat = replace(
            self._beat,
            count=self._beat.count + 1,
            address=own_address(),
            doing=found.doing,
            busy_s=found.for_s if found.is_busy else None,
            waits_for_nobody=not found.waits.startswith("has waited"),
        )
        self._beat.write(own, self._member.rank)

    def _read_peers(self, own: Store) -> None:
        """Read the heartbeats where something depends on them: large jobs have many."""
        found, limit_s, now = self._report, self.limit.seconds, time.perf_counter()
        is_waiting = found.is_busy or (found.is_timed and found.for_s > limit_s / 4)
        if not self._peers.are_known or (is_waiting and now - self._last_read > limit_s / 10):
            self._peers.read(own)
            self._last_read = now

    def _log_notice(self, own: Store) -> None:
        """Log a long wait now and then, on one of the ranks that wait."""
        found = self._report
        if not found.is_timed:
            self._next_notice_s = NOTICE_S
        if not found.is_timed or found.for_s < self._next_notice_s:
            return
        self._next_notice_s = 2 * found.for_s
        rank, minute = str(self._member.rank), int(time.time() // NOTICE_S)
        if own.compare_set(f"{HANG} notice/{minute}", "", rank) != rank.encode():
            return
        self._peers.read(own)
        ranks = range(self._member.num_ranks)
        free = [r for r in ranks if self._peers.is_not_waiting(r)][:MOST_NAMED]
        doing = "; ".join(f"rank {r} {self._peers.doing(r)}" for r in free)
        others = f" Meanwhile {doing}." if free else ""
        limit = f"{self.limit.name}={self.limit.seconds:g}"
        _print(f"{self._line(found)}; at {limit} the job ends.{others}")

    def _publish(self, line: str, waits: str, reason: str) -> None:
        """Publish this rank's status and collect the others'; blocks if the store has stopped."""
        is_known = self._hang.is_known
        with suppress(Exception):
            own, hang, rank = self._store, self._hang, str(self._member.rank)
            if own is None:
                return
            ranks, given = range(self._member.num_ranks), f"{HANG}/reason"
            self._peers.read(own)
            entry = {"line": line, "waits": waits, "fates": self._peers.fates(ranks)}
            own.set(f"{HANG}/{rank}", json.dumps(entry))
            # A rank that was notified may not claim the reason of one that has come to its limit.
            is_speaker = not is_known and own.compare_set(HANG, "", rank) == rank.encode()
            if is_speaker:
                until(lambda: all(own.check([f"{HANG}/{r}"]) for r in ranks), GRACE_S)
                spoken = [r for r in ranks if own.check([f"{HANG}/{r}"])]
                hang.lines = {r: json.loads(own.get(f"{HANG}/{r}")) for r in spoken}
                if failure.is_first(own):  # else the job has told another reason
                    self._print_reason(reason)
                hang.reason_given = True
                own.set(given, rank)
            else:  # at once, for rank 0 may keep the store, and end
                hang.reason_given = until(lambda: own.check([given]), GRACE_S + 2 * _CONNECTION_S)

    def _print_reason(self, reason: str) -> None:
        """Print why the job ends, and which ranks may be the cause, unless another rank has."""
        hang = self._hang
        if hang.reason_given:
            return
        hang.reason_given = True
        try:
            suspects = self._suspects()
        except Exception as cause:  # the reason itself is known
            suspects = f" Whose fault it is cannot be said: {cause!r}."
        error = TrainingError(
            f"rank {self._member.rank} {reason}, and {self.limit.name}={self.limit.seconds:g}; "
            f"the job ends.{suspects}"
        )
        _print(failure.sentence_of(error))
        failure.advise()
        failure.tell_launcher(error)

    def _suspects(self) -> str:
        lines = self._hang.lines
        ranks = range(self._member.num_ranks)
        if lines is None:
            fates = self._peers.fates(ranks)
            seen = [self._peers.describe(rank, fates) for rank in fates]
            return (
                f" The other ranks cannot be asked, since the job's store at {store.address()} "
                "does not answer: the process that keeps it has ended or is stopped, or the "
                f"network between has failed ({' and '.join(INTERFACES)} name its interface)."
                f"{_listed(seen)}"
            )
        fates = {int(r): fate for entry in lines.values() for r, fate in entry["fates"].items()}
        silent = [r for r in ranks if r not in lines]
        idle = [r for r, entry in lines.items() if not entry["waits"].startswith("has waited")]
        found = f" Waiting for nobody: {named(tuple(idle))}." if idle else ""
        found += _listed([self._peers.describe(rank, fates) for rank in silent])
        if not idle and not silent and all(JOINING in t["waits"] for t in lines.values()):
            found += " " + network_hint(self._peers)
        return found

    def _why_lost(self, reason: str) -> str:
        """Explain a lost connection to another rank in a sentence; takes several seconds."""
        peers, ranks = Peers(self._member.num_ranks), range(self._member.num_ranks)
        try:
            own = store.connect()
            peers.read(own)
            until(lambda: False, failure.LAUNCHER_S)
            own.check([HANG])
            peers.read(own)
        except Exception:
            fates = self._peers.fates(ranks)
            seen = [self._peers.describe(rank, fates) for rank in fates]
            return (
                f"rank {self._member.rank} on {self._beat.host} has lost the other ranks "
                f"({reason}), and the job's store at {store.address()} does not answer: the "
                f"process that kept it has ended, or its host cannot be reached.{_listed(seen)}"
            )
        return why_lost(self._member.rank, peers, reason)


def timeouts_s(limit: Limit) -> float:
    """Return the timeout for torch's process groups: later than the watchdog, which says more."""
    return PATIENCE * limit.seconds + 2 * GRACE_S


_current: list[Watchdog] = []


def start(member: Member, limit: Limit) -> None:
    """Start the watchdog of this rank, in place of a former one."""
    stop()
    _current.append(Watchdog(member, limit))
    _current[0].start()


def move(place: str) -> None:
    """Move this rank to its coordinates in a new mesh of the same ranks.

    Args:
        place: its coordinates.
    """
    own = current()
    if own is not None:
        own.move(place)


def stop() -> None:
    """Stop the watchdog of this rank."""
    while _current:
        _current.pop().join()


def current() -> Watchdog | None:
    """Return the watchdog of this rank; None in a job of one, or before `merak.init`."""
    return _current[0] if _current else None


def _listed(descriptions: list[str]) -> str:
    return f" Without an answer: {'; '.join(descriptions)}." if descriptions else ""


def _print(line: str) -> None:
    with suppress(Exception):  # a closed stream must not keep the process from ending
        # The main thread may have put something else in the place of sys.stderr, as tracing does.
        write_line(line, sys.__stderr__)
        sys.stdout.flush()
