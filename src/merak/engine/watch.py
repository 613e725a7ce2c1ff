"""Makes a hang impossible to miss: when a rank waits too long, every rank says where it stands.

A thread on each rank looks where its engine is. The first that is there longer than the limit says
so in the job's store; the watching threads of the other ranks find it there, and each prints where
its own rank stands, also while its main thread blocks in a transfer or sleeps in the user's code.
Then one rank gives the reason, and all of them end. A rank that cannot speak, because it was
stopped or has ended, is named; where the store itself has gone, each rank comes to its own limit.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from merak.core import failure
from merak.core.errors import ArgumentsError, TrainingError
from merak.core.mesh import Mesh
from merak.engine.progress import Progress, Standing
from merak.schedule.ir import Kind

HANG = "merak/hang"
"""The store's key of the rank whose patience has ended; those below it hold what ranks say."""

GRACE_S = 10.0
"""Seconds that the ranks get to say where they stand."""

LINGER_S = 0.5
"""Seconds that rank 0 stays after all is said: without torchrun it keeps the store of the job."""

_MOST_BETWEEN_LOOKS_S = 2.0
_CONNECTION_S = 5.0

_NAMES = {
    Kind.FORWARD: "forward",
    Kind.RECOMPUTE: "recompute",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRADIENT: "input gradient",
    Kind.WEIGHT_GRADIENT: "weight gradient",
}


def check_limit(limit_s: float) -> None:
    """Refuse a limit that is none.

    Raises:
        ArgumentsError: it is not above 0.
    """
    if not limit_s > 0:
        raise ArgumentsError(
            f"hang_limit_s={limit_s} is not a time to wait; use a number of seconds above 0."
        )


@dataclass(slots=True)
class _Said:
    """What this rank knows of the end of the job, shared by its threads."""

    # Another rank's patience has ended.
    is_told: bool = False
    # What each rank says, as far as the store has it.
    lines: dict[int, dict[str, str]] | None = None
    reason_given: bool = False


class Watch:
    """Watches one rank's engine until it is stopped.

    Args:
        progress: what the engine tells.
        mesh: the grid of ranks.
        limit_s: seconds that the engine may wait, or be in one action.
    """

    def __init__(self, progress: Progress, mesh: Mesh, limit_s: float) -> None:
        self._progress = progress
        self._mesh = mesh
        self._limit_s = limit_s
        self._every_s = min(_MOST_BETWEEN_LOOKS_S, limit_s / 5)
        self._said = _Said()
        # A plain flag: a lock might be held when a data loader forks.
        self._is_stopped = False
        self._is_leaving = threading.Event()
        self._threads: list[threading.Thread] = []
        self._store: Store | None = None
        self._device: tuple[Standing | None, float] = (None, 0.0)

    def start(self) -> None:
        """Begin to watch."""
        self._threads = [
            threading.Thread(target=work, daemon=True, name="merak watch")
            for work in (self._mind, self._listen)
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(_see_out, weakref.ref(self), os.getpid())

    def stop(self) -> None:
        """Let the threads end."""
        self._is_stopped = True

    def join(self) -> None:
        """Stop, and wait until the threads have ended."""
        self._is_stopped = True
        self._is_leaving.set()
        for thread in self._threads:
            thread.join(_CONNECTION_S)

    # ---- this rank ----

    def _mind(self) -> None:
        job = dist.group.WORLD
        known = 0
        while not self._is_stopped and dist.is_initialized() and dist.group.WORLD is job:
            known = outlast(self._limit_s + 2 * GRACE_S, known)
            if self._is_overdue() or self._said.is_told:
                self._end()
            self._is_leaving.wait(self._every_s)

    def _is_overdue(self) -> bool:
        now = time.perf_counter()
        behind = self._progress.device_standing()
        if behind is not self._device[0]:
            self._device = (behind, now)
        own = self._progress.standing
        late_host = own.is_engines and now - own.since_s > self._limit_s
        return late_host or (behind is not None and now - self._device[1] > self._limit_s)

    def _end(self) -> None:
        """Say where this rank stands, let one rank give the reason, and end the process."""
        standing, since = self._where()
        line = self._line(standing, since)
        _print(line)
        waits = _waited(standing, since) if standing.is_engines else ""
        teller = threading.Thread(target=self._tell, args=(line, waits), daemon=True)
        teller.start()
        teller.join(GRACE_S + _CONNECTION_S)
        self._give_reason(waits)
        if self._mesh.rank == 0:
            time.sleep(LINGER_S)
        os._exit(1)

    def _where(self) -> tuple[Standing, float]:
        """Where the rank stands, the device's place before the host's, and for how long, s."""
        now = time.perf_counter()
        behind, since = self._device
        if behind is not None:
            return behind, now - since
        own = self._progress.standing
        return own, now - own.since_s

    def _line(self, standing: Standing, since_s: float) -> str:
        mesh = self._mesh
        frames = sys._current_frames()
        main = frames.get(threading.main_thread().ident or 0)
        place = failure.users_line(traceback.extract_stack(main)) if main is not None else ""
        who = f"rank {mesh.rank} (pp {mesh.pp_rank}, dp {mesh.dp_rank}, tp {mesh.tp_rank})"
        said = f"merak: {who} {describe(standing, since_s)}"
        if standing.action is not None and standing.wait is None and mesh.tp > 1:
            said += f", unless for its tensor parallel peers, {_ranks(mesh.peers('tp'))}"
        return said + (f" [{place}]" if place else "")

    # ---- all ranks ----

    def _listen(self) -> None:
        """Look in the store whether another rank's patience has ended."""
        with suppress(Exception):  # a store that is gone: then each rank has its own limit
            # Both while the store is there: one may have to wait in it when the other must not.
            self._store, store = failure.connect(), failure.connect()
            while not self._is_stopped and dist.is_initialized() and not self._said.is_told:
                self._is_leaving.wait(self._every_s)
                self._said.is_told = store.check([HANG])

    def _tell(self, line: str, waits: str) -> None:
        """Tell the others, and read what they say; may block where the store has stopped."""
        with suppress(Exception):
            store, said, rank = self._store, self._said, str(self._mesh.rank)
            if store is None:
                return
            store.set(f"{HANG}/{rank}", json.dumps({"line": line, "waits": waits}))
            # A rank that was told may not claim the reason of one that has come to its limit.
            is_speaker = not said.is_told and store.compare_set(HANG, "", rank) == rank.encode()
            ranks, reason = range(self._mesh.world_size), f"{HANG}/reason"
            _until(lambda: all(store.check([f"{HANG}/{r}"]) for r in ranks), GRACE_S)
            if is_speaker:
                spoken = [r for r in ranks if store.check([f"{HANG}/{r}"])]
                said.lines = {r: json.loads(store.get(f"{HANG}/{r}")) for r in spoken}
                if failure.is_first(store):  # else the job has told another reason
                    self._give_reason(waits)
                said.reason_given = True
                store.set(reason, rank)
            else:
                said.reason_given = _until(lambda: store.check([reason]), _CONNECTION_S)

    def _give_reason(self, waits: str) -> None:
        """Say why the job ends, and who may be the cause, unless that has been said."""
        said = self._said
        if said.reason_given:
            return
        said.reason_given = True
        error = TrainingError(
            f"rank {self._mesh.rank} {waits or 'was told of a rank that waits'}, and "
            f"hang_limit_s={self._limit_s:g}; the job ends.{self._suspects()}"
        )
        _print(failure.sentence_of(error))
        failure.tell_launcher(error)

    def _suspects(self) -> str:
        lines = self._said.lines
        if lines is None:
            return " The other ranks cannot be asked: the job's store does not answer."
        silent = [r for r in range(self._mesh.world_size) if r not in lines]
        idle = [r for r, told in lines.items() if not told["waits"].startswith("has waited")]
        found = f" Waiting for nobody: {_ranks(idle)}." if idle else ""
        if silent:
            found += f" Without an answer, so stopped, dead or busy: {_ranks(silent)}."
        return found


def _see_out(watch: weakref.ref[Watch], pid: int) -> None:
    """Let a watch's threads end before Python does.

    One that is in torch's own code then aborts the process: where Python ends a thread inside of
    C++, that calls `std::terminate`.
    """
    running = watch()
    if running is not None and os.getpid() == pid:  # a fork has the handlers, not the threads
        running.join()


def describe(standing: Standing, since_s: float) -> str:
    """Where a rank stands, as the rest of a sentence that begins with the rank.

    Args:
        standing: where.
        since_s: for how long, s.
    """
    action = standing.action
    if not standing.is_engines:
        return f"is outside the engine's steps for {since_s:.1f} s and waits for nobody"
    place = f"stands in {standing.phase}" if standing.phase else "stands between steps"
    if action is not None:
        place = (
            f"stands at {action} (stage {action.stage}, {_NAMES[action.kind]}, microbatch "
            f"{action.microbatch}) of {standing.phase}"
        )
    return f"{place} and {_waited(standing, since_s)}"


def _waited(standing: Standing, since_s: float) -> str:
    if standing.wait is None:
        work = "computed" if standing.action is not None else "worked"
        return f"has {work} for {since_s:.1f} s, without a wait of its own"
    what, peers = standing.wait
    return f"has waited {since_s:.1f} s for {what} {_ranks(peers)}"


def _ranks(ranks: Sequence[int]) -> str:
    named = ", ".join(map(str, ranks))
    return f"rank {named}" if len(ranks) == 1 else f"ranks {named}"


def _print(line: str) -> None:
    with suppress(Exception):  # a closed stream must not keep the process from ending
        print(line, file=sys.stderr, flush=True)
        sys.stdout.flush()


def _until(holds: Callable[[], bool], limit_s: float) -> bool:
    """Whether something comes to hold within a time."""
    deadline = time.perf_counter() + limit_s
    while time.perf_counter() < deadline:
        if holds():
            return True
        time.sleep(0.05)
    return holds()


def outlast(limit_s: float, known: int) -> int:
    """Let torch's own timeouts come after the watch, which says more.

    Args:
        limit_s: what no process group's timeout is to be shorter than.
        known: groups that were seen to before.

    Returns:
        The number of groups there are.
    """
    groups = list(dist.distributed_c10d._world.pg_map)
    if len(groups) == known:
        return known
    wanted = timedelta(seconds=limit_s)
    for group in groups:
        backends = [group._get_backend(device) for device in group._device_types]
        if any(backend.options._timeout < wanted for backend in backends):
            dist.distributed_c10d._set_pg_timeout(wanted, group)
    return len(groups)
