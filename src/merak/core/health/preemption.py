"""SIGTERM (preemption): all ranks stop before one step, save there, and exit with code 143.

The signal may reach one rank or all of them. A rank that gets it writes so to the job's store,
where the watchdogs of the others find it. From then on each rank must stop at the next step that
its main thread begins, and publishes the number of that step; the largest of all ranks is where the
job stops. No rank has begun it, and none passes it, since each waits there until all have
published; so the agreement costs training no message.

The job ends at once, without a checkpoint, where no training runs, at a second SIGTERM, at the
limit, and where the signal is a launcher's that stops the other ranks after one has failed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from torch.distributed.distributed_c10d import Store

from merak.core.health import failure
from merak.core.health import store as job_store
from merak.core.health.heartbeat import Peers
from merak.core.health.signals import receive
from merak.core.health.stderr import write_line

TERMINATED = 143
"""Exit code of a process that SIGTERM has ended, as of shells."""

KEY = "merak/sigterm"
"""Store key of the rank that has received SIGTERM; keys below it hold the steps of ranks."""

SAME_S = 2.0
"""Seconds within which a second SIGTERM is the first one, sent on by the launcher."""

REPORT_S = 1.0
"""Seconds that a rank gets to report its own failure."""

_POLL_S = 0.1


class _Stop:
    """Stop of this rank, if one is requested; threads share it under its condition."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.first_s: float | None = None
        self.limit_s: float | None = None  # None where no training runs
        self.is_requested = False
        self.is_saved = False
        self.supervisor: threading.Thread | None = None
        # Steps that the main thread has begun, and the one before which all ranks stop.
        self.num_begun = 0
        self.at: int | None = None


_stop = _Stop()


def listen() -> None:
    """Receive SIGTERM from now on, unless the script has a handler of its own for it."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and receive(signal.SIGTERM, _received):
        signal.signal(signal.SIGTERM, _handler)
        os.register_at_fork(after_in_child=_forget)


def _handler(number: int, frame: object) -> None:
    """Do nothing: the thread that reads signals has received it."""


def _forget() -> None:
    """Let SIGTERM end a forked process, such as a data loader's, as by default."""
    with suppress(ValueError):
        if signal.getsignal(signal.SIGTERM) is _handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def saves_on_sigterm(limit_s: float) -> Iterator[None]:
    """Enter a training loop that asks `must_stop` before each step, and then saves.

    Args:
        limit_s: seconds from the signal to the end of the process; 0 ends it at once.
    """
    with _stop.changed:
        _stop.limit_s, _stop.num_begun = limit_s or None, 0
    try:
        yield
    finally:
        with _stop.changed:
            _stop.limit_s = None


def must_stop() -> bool:
    """Whether the job stops before the step that begins now; the same on all ranks."""
    with _stop.changed:
        _stop.num_begun += 1
        while _stop.is_requested and _stop.at is None:
            _stop.changed.wait(1.0)
        return _stop.at is not None and _stop.num_begun >= _stop.at


def has_saved() -> None:
    """Mark the checkpoint of a stop by SIGTERM as saved, so that no exit is forced."""
    _stop.is_saved = True
    if _stop.supervisor is not None:
        # A thread in torch's own code when Python ends would abort the process.
        _stop.supervisor.join(job_store.ANSWER_S)


def look(store: Store) -> None:
    """Look in the job's store whether another rank has received SIGTERM.

    Args:
        store: a connection to it, of the calling thread.
    """
    if _stop.limit_s is not None and not _stop.is_requested and store.check([KEY]):
        _request()


def _received() -> None:
    """Act on a SIGTERM, in the thread that reads signals."""
    if signal.getsignal(signal.SIGTERM) is not _handler:
        return  # the script has set its own since
    now = time.monotonic()
    if _stop.first_s is not None and now - _stop.first_s > SAME_S:
        _end()
    _stop.first_s = _stop.first_s or now
    _request()


def _request() -> None:
    """Stop the job: before a step, if this rank trains; else now."""
    with _stop.changed:
        if _stop.is_requested:
            return
        if _stop.limit_s is None or not _stop.num_begun:  # nothing is trained yet
            _end()
        _stop.is_requested = True
        work = ((_end_at, _stop.limit_s), (_supervise, _stop.num_begun + 1))
        threads = [
            threading.Thread(target=target, args=(value,), daemon=True, name="merak SIGTERM")
            for target, value in work
        ]
        _stop.supervisor = threads[-1]  # before the loop can have saved, and waits for it
    for thread in threads:
        thread.start()


def _supervise(next_step: int) -> None:
    """Agree on the step with other ranks, and end the process where it cannot be reached.

    Args:
        next_step: the first step before which this rank can stop.
    """
    try:
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            _stop_at(next_step)
        else:
            _agree(job_store.connect(), next_step)
    except Exception:  # the job's store does not answer
        if _stop.at is None:
            _end()
    while not _stop.is_saved:
        if _stop.limit_s is None:  # the loop has ended, at its last step or by a failure
            time.sleep(REPORT_S)
            _end()
        time.sleep(_POLL_S)


def _agree(own: Store, next_step: int) -> None:
    """Publish this rank's step, find that of all ranks, and look out for ranks that have failed."""
    rank, num_ranks = os.environ["RANK"], int(os.environ["WORLD_SIZE"])
    keys = [f"{KEY}/{other}" for other in range(num_ranks)]
    own.set(f"{KEY}/{rank}", str(next_step))
    own.set(KEY, rank)
    peers = Peers(num_ranks)
    while not _stop.is_saved and _stop.limit_s is not None:
        if own.check([failure.KEY]):
            _end()
        peers.read(own)
        fates = peers.fates(range(num_ranks))
        if any("is stopped" not in fate for fate in fates.values()):
            _end()
        if _stop.at is None and own.check(keys):
            _stop_at(max(int(step) for step in own.multi_get(keys)))
        time.sleep(_POLL_S)


def _stop_at(step: int) -> None:
    with _stop.changed:
        _stop.at = step
        _stop.changed.notify_all()


def _end_at(limit_s: float) -> None:
    """End the process at the limit."""
    time.sleep(limit_s)
    if not _stop.is_saved and int(os.environ.get("RANK", "0")) == 0:
        with suppress(Exception):
            write_line(
                f"merak: SIGTERM came, and its step and checkpoint took longer than "
                f"sigterm_limit_s={limit_s:g}; the job ends without that checkpoint.",
                sys.__stderr__,
            )
    _end()


def _end() -> None:
    """End the process now."""
    with suppress(Exception):
        sys.stdout.flush()
    os._exit(TERMINATED)
