"""Makes a hang impossible to miss: when a rank waits too long, every rank says where it stands.

A watchdog lives on each rank from `merak.init` to its end, in two threads. One looks how long the
rank has waited for others: in the engine's steps, or outside them as `merak.core.health.status`
says. The other exchanges heartbeats through the job's store. The first rank that has waited longer
than the limit says so there; the watchdogs of the other ranks find it, and each prints where its
own rank stands, also while its main thread blocks in a transfer or sleeps in the user's code. Then
one rank gives the reason, and all of them end. A rank that cannot speak, because it was stopped or
has ended, is named with what it was last heard to do; where the store itself has gone, each rank
comes to its own limit.

A rank may rightly trace, load or save for minutes while others wait: as long as its heart beats
they have patience, several times the limit.
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
from merak.core.health import failure, store
from merak.core.health.heartbeat import (
    INTERFACES,
    Heartbeat,
    Peers,
    ended,
    network_hint,
    own_heartbeat,
    why_lost,
)
from merak.core.health.status import Report, named, report
from merak.core.health.timeouts import extend_timeouts, until
from merak.core.source_lines import users_line

HANG = "merak/hang"
"""The store's key of the rank whose patience has ended; those below it hold what ranks say."""

GRACE_S = 10.0
"""Seconds that the ranks get to say where they stand."""

LINGER_S = 1.0
"""Seconds that rank 0 stays after all is said: without torchrun it keeps the store of the job."""

NOTICE_S = 60.0
"""Seconds after which one rank of those that wait says so, and again after twice as many."""

PATIENCE = 3.0
"""Limits that ranks wait for one that works in a phase, such as saving, while its heart beats."""

MOST_NAMED = 4
"""Ranks that a notice describes."""

MEETING = "the connection to"
"""What ranks wait for while they join the job."""

_MOST_BETWEEN_LOOKS_S = 2.0
_CONNECTION_S = 5.0

Reporter = Callable[[], Report | None]
"""What a rank does, said by a part of it; None where that part does nothing."""


@dataclass(frozen=True, slots=True)
class Member:
    """One rank of a job.

    Args:
        rank: its number.
        num_ranks: how many there are.
        place: where it stands in the mesh.
    """

    rank: int
    num_ranks: int
    place: str


@dataclass(frozen=True, slots=True)
class Limit:
    """How long a rank waits, and by which argument.

    Args:
        name: of the argument.
        seconds: its value.
    """

    name: str
    seconds: float


@dataclass(slots=True)
class _Said:
    """What this rank knows of the end of the job, shared by its threads."""

    # Another rank's patience has ended.
    is_told: bool = False
    # What each rank says, as far as the store has it.
    lines: dict[int, dict[str, Any]] | None = None
    reason_given: bool = False


class Watchdog:
    """Watches one rank until it is stopped.

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
        self._said = _Said()
        # A plain flag: a lock might be held when a data loader forks.
        self._is_stopped = False
        self._is_leaving = threading.Event()
        self._threads: list[threading.Thread] = []
        self._store: Store | None = None

    def start(self) -> None:
        """Begin to watch; the job's store can be reached."""
        self._threads = [
            threading.Thread(target=work, daemon=True, name="merak watchdog")
            for work in (self._mind, self._listen)
        ]
        for thread in self._threads:
            thread.start()
        failure.witness(self._why_lost)
        pid = os.getpid()
        # A thread in torch's own code when Python ends would abort the process.
        atexit.register(lambda: self.join() if os.getpid() == pid else None)

    def add(self, reporter: Reporter) -> None:
        """Let a part of the rank report before those that were added earlier."""
        self._reporters.insert(0, reporter)

    def remove(self, reporter: Reporter) -> None:
        """Ask a part no more."""
        if reporter in self._reporters:
            self._reporters.remove(reporter)

    def stop(self) -> None:
        """Let the threads end."""
        self._is_stopped = True
        self._is_leaving.set()

    def join(self) -> None:
        """Stop, and wait until the threads have ended."""
        self.stop()
        for thread in self._threads:
            thread.join(_CONNECTION_S)

    @property
    def _every_s(self) -> float:
        return min(_MOST_BETWEEN_LOOKS_S, self.limit.seconds / 5)

    # ---- this rank ----

    def _mind(self) -> None:
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
            if self._said.is_told or self._is_overdue():
                self._end()
            self._is_leaving.wait(self._every_s)

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
        """Whether a rank that was heard of has not been for too long."""
        beat = self._peers.get(rank)
        if beat is None or beat.has_left or rank == self._member.rank:
            return False
        # What was read long ago, since nothing was to be waited for, says nothing.
        was_read = time.perf_counter() - self._last_read < self.limit.seconds / 2
        return was_read and self._peers.silent_s(rank) > self.limit.seconds + 2 * self._every_s

    def _end(self) -> None:
        """Say where this rank stands, let one rank give the reason, and end the process."""
        try:
            self._say_and_tell()
        except Exception:  # the process must end, whatever cannot be said
            traceback.print_exc()
        if self._member.rank == 0:
            time.sleep(LINGER_S)
        os._exit(1)

    def _say_and_tell(self) -> None:
        found = self._current()
        line = self._line(found)
        _print(line)
        waits = found.waits if found.is_timed else ""
        reason = waits or "has found a rank that says nothing"
        if self._said.is_told:
            reason = waits or "was told of a rank that waits"
        teller = threading.Thread(target=self._tell, args=(line, waits, reason), daemon=True)
        teller.start()
        teller.join(GRACE_S + 3 * _CONNECTION_S)
        self._give_reason(reason)

    def _line(self, found: Report) -> str:
        frames = sys._current_frames()
        main = frames.get(threading.main_thread().ident or 0)
        place = users_line(traceback.extract_stack(main)) if main is not None else ""
        who = f"rank {self._member.rank} ({self._member.place}, {self._beat.host})"
        return f"merak: {who} {found.doing}" + (f" [{place}]" if place else "")

    # ---- all ranks ----

    def _listen(self) -> None:
        """Tell the others of this rank, and look whether another one's patience has ended."""
        with suppress(Exception):  # a store that is gone: then each rank has its own limit
            # Both while the store is there: one may have to wait in it when the other must not.
            self._store, own = store.connect(), store.connect()
            while not self._is_stopped and not self._said.is_told:
                self._tell_heartbeat(own)
                self._read_peers(own)
                self._give_notice(own)
                self._said.is_told = own.check([HANG])
                self._is_leaving.wait(self._every_s)
            if self._is_stopped:
                ended(self._beat).write(own, self._member.rank)

    def _tell_heartbeat(self, own: Store) -> None:
        found = self._current()
        self._beat = replace(
            self._beat,
            count=self._beat.count + 1,
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

    def _give_notice(self, own: Store) -> None:
        """Say once in a while what is waited for; of all ranks that wait, one does."""
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

    def _tell(self, line: str, waits: str, reason: str) -> None:
        """Tell the others, and read what they say; may block where the store has stopped."""
        is_told = self._said.is_told
        with suppress(Exception):
            own, said, rank = self._store, self._said, str(self._member.rank)
            if own is None:
                return
            ranks, given = range(self._member.num_ranks), f"{HANG}/reason"
            self._peers.read(own)
            told = {"line": line, "waits": waits, "fates": self._peers.fates(ranks)}
            own.set(f"{HANG}/{rank}", json.dumps(told))
            # A rank that was told may not claim the reason of one that has come to its limit.
            is_speaker = not is_told and own.compare_set(HANG, "", rank) == rank.encode()
            if is_speaker:
                until(lambda: all(own.check([f"{HANG}/{r}"]) for r in ranks), GRACE_S)
                spoken = [r for r in ranks if own.check([f"{HANG}/{r}"])]
                said.lines = {r: json.loads(own.get(f"{HANG}/{r}")) for r in spoken}
                if failure.is_first(own):  # else the job has told another reason
                    self._give_reason(reason)
                said.reason_given = True
                own.set(given, rank)
            else:  # at once, for rank 0 may keep the store, and end
                said.reason_given = until(lambda: own.check([given]), GRACE_S + 2 * _CONNECTION_S)

    def _give_reason(self, reason: str) -> None:
        """Say why the job ends, and who may be the cause, unless that has been said."""
        said = self._said
        if said.reason_given:
            return
        said.reason_given = True
        try:
            suspects = self._suspects()
        except Exception as cause:  # the reason itself is known
            suspects = f" Whose fault it is cannot be said: {cause!r}."
        error = TrainingError(
            f"rank {self._member.rank} {reason}, and {self.limit.name}={self.limit.seconds:g}; "
            f"the job ends.{suspects}"
        )
        _print(failure.sentence_of(error))
        failure.tell_launcher(error)

    def _suspects(self) -> str:
        lines = self._said.lines
        ranks = range(self._member.num_ranks)
        if lines is None:
            fates = self._peers.fates(ranks)
            seen = [self._peers.verdict(rank, fates) for rank in fates]
            return (
                f" The other ranks cannot be asked, since the job's store at {store.address()} "
                "does not answer: the process that keeps it has ended or is stopped, or the "
                f"network between has failed ({' and '.join(INTERFACES)} name its interface)."
                f"{_listed(seen)}"
            )
        fates = {int(r): said for told in lines.values() for r, said in told["fates"].items()}
        silent = [r for r in ranks if r not in lines]
        idle = [r for r, told in lines.items() if not told["waits"].startswith("has waited")]
        found = f" Waiting for nobody: {named(tuple(idle))}." if idle else ""
        found += _listed([self._peers.verdict(rank, fates) for rank in silent])
        if not idle and not silent and all(MEETING in t["waits"] for t in lines.values()):
            found += " " + network_hint(self._peers)
        return found

    def _why_lost(self, reason: str) -> str:
        """What a lost connection to another rank comes from, as a sentence; takes its time."""
        peers, ranks = Peers(self._member.num_ranks), range(self._member.num_ranks)
        try:
            own = store.connect()
            peers.read(own)
            until(lambda: False, failure.LAUNCHER_S)
            own.check([HANG])
            peers.read(own)
        except Exception:
            fates = self._peers.fates(ranks)
            seen = [self._peers.verdict(rank, fates) for rank in fates]
            return (
                f"rank {self._member.rank} on {self._beat.host} has lost the other ranks "
                f"({reason}), and the job's store at {store.address()} does not answer: the "
                f"process that kept it has ended, or its host cannot be reached.{_listed(seen)}"
            )
        return why_lost(self._member.rank, peers, reason)


def timeouts_s(limit: Limit) -> float:
    """What torch's own timeouts are to be: later than the watchdog, which says more."""
    return PATIENCE * limit.seconds + 2 * GRACE_S


_current: list[Watchdog] = []


def start(member: Member, limit: Limit) -> None:
    """Watch this rank from now on, in the place of what watched it before."""
    stop()
    _current.append(Watchdog(member, limit))
    _current[0].start()


def stop() -> None:
    """Watch this rank no more."""
    while _current:
        _current.pop().join()


def current() -> Watchdog | None:
    """What watches this rank; None in a job of one, or before `merak.init`."""
    return _current[0] if _current else None


def _listed(verdicts: list[str]) -> str:
    return f" Without an answer: {'; '.join(verdicts)}." if verdicts else ""


def _print(line: str) -> None:
    with suppress(Exception):  # a closed stream must not keep the process from ending
        # The main thread may have put something else in the place of sys.stderr, as tracing does.
        print(line, file=sys.__stderr__ or sys.stderr, flush=True)
        sys.stdout.flush()
