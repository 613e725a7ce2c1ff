"""Report of a failed job of many ranks: the first cause, once, in one sentence.

One rank fails first. Its peers then lose their connections, or fail in the same way. The ranks
share a store that torchrun keeps: the first to write its failure there reports it, the others end
silently. A rank that has only lost a connection first waits for the launcher, which knows how a
killed peer has ended, and stops the others; then it reports the heartbeats of the other ranks.

A `MerakError` is shown as its sentence and the line of the user's script that led to it; set
MERAK_TRACEBACK=1 for the whole traceback. Any other exception is shown as Python shows it. An
interrupt is one line.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TypeGuard

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from merak.core.errors import MerakError, TrainingError
from merak.core.health import interrupt
from merak.core.health import store as job_store
from merak.core.health.status import phase
from merak.core.health.stderr import write_line
from merak.core.source_lines import MERAK, users_line

TRACEBACK_VARIABLE = "MERAK_TRACEBACK"
"""Environment variable that requests whole tracebacks."""

KEY = "merak/first failure"
EARLY_KEY = "merak/first failure before joining"
_IMPORTED_S = time.time()

THREADS = "merak "
"""What the names of Merak's own threads begin with."""

LAUNCHER_S = 10.0
"""Seconds that the launcher gets to stop a rank that failed because another one did."""

EXIT_S = 10
"""Seconds that a failed rank gets to close its files, before it is ended."""

BAD_INPUT, FAILED = 2, 1
"""Exit codes of a rank: for input that makes no sense, and for a run that failed."""

INTERRUPT_EXIT_S = 2
"""Seconds that an interrupted one gets: somebody waits for it."""

LOST = (
    "rank {rank} has lost the connection to another rank of the job, and cannot go on ({reason})."
)

_CONNECTION_WORDS = ("gloo", "connection", "socket", "nccl", "store", "timed out", "peer")

_TRANSPORT = (MERAK, os.path.dirname(dist.__file__) + os.sep)

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


_explainers: list[Callable[[str], str]] = []

_limits: list[Callable[[BaseException], str | None]] = []

_locators: list[Callable[[MerakError], None]] = []

_advisers: list[Callable[[], None]] = []
_starting: list[bool] = []


def explain_lost_connections(why: Callable[[str], str]) -> None:
    """Register a function that explains why a connection to another rank was lost.

    Args:
        why: returns the sentence, given torch's message; takes about `LAUNCHER_S`.
    """
    _explainers[:] = [why]


def locate_errors(locate: Callable[[MerakError], None]) -> None:
    """Register a function that adds the file and line of a named input to reported errors.

    Args:
        locate: changes the message of an error in place.
    """
    _locators[:] = [locate]


@contextmanager
def starting(advise: Callable[[], None]) -> Iterator[None]:
    """Enter the start of a job: whatever ends it inside is reported with advice below.

    Args:
        advise: prints the advice; it takes a few seconds at most. Inside of another start, that
            one's advice counts.
    """
    if _starting:
        yield
        return
    _advisers[:] = [advise]
    _starting.append(True)
    try:
        yield
    finally:
        _starting.clear()
    started()  # not after an exception, which is reported later


def started() -> None:
    """Drop the troubleshooting advice: the job has started, or its failure has been reported."""
    _advisers.clear()


def advise() -> None:
    """Print advice, once, where the job has ended while it started."""
    while _advisers:
        with suppress(Exception):  # the error itself has been reported
            _advisers.pop()()


def in_words(error: BaseException) -> BaseException:
    """Put an exception about a limit of the system into one sentence; others are given back.

    Args:
        error: that ends this rank.
    """
    for explain in _limits:
        if not isinstance(error, MerakError) and (sentence := explain(error)) is not None:
            return TrainingError(sentence).with_traceback(error.__traceback__)
    return error


def install(explain: Callable[[BaseException], str | None] | None = None) -> None:
    """Install the exception hook of this process; further calls change nothing else.

    Args:
        explain: returns a sentence for an exception of a library that has met a limit of the
            system, and None for others.
    """
    if explain is not None:
        _limits[:] = [explain]
    interrupt.listen()
    before = sys.excepthook
    if not (isinstance(before, partial) and before.func is _report):
        sys.excepthook = partial(_report, before)
        threading.excepthook = partial(_report_in_thread, threading.excepthook)


def sentence_of(error: BaseException) -> str:
    """Format an error as one sentence, with the line of the user's script that led to it."""
    place = users_line(traceback.extract_tb(error.__traceback__))
    sentence = "\nmerak: ".join(map(str, error.errors)) if is_joined(error) else str(error)
    return f"merak: {sentence}" + (f" [{place}]" if place else "")


def is_joined(error: BaseException) -> TypeGuard[MerakError]:
    """Whether an error joins several, which are lines of their own."""
    return isinstance(error, MerakError) and len(error.errors) > 1


def is_lost_connection(error: BaseException) -> bool:
    """Whether an error may come from a peer that has ended, rather than from this rank."""
    if isinstance(error, dist.DistError):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    in_transport = bool(frames) and frames[-1].filename.startswith(_TRANSPORT)
    words = str(error).lower()
    return (
        type(error) is RuntimeError and in_transport and any(w in words for w in _CONNECTION_WORDS)
    )


def _report(
    before: Hook, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    is_single_process = int(os.environ.get("WORLD_SIZE", "1")) == 1
    if issubclass(kind, KeyboardInterrupt) or interrupt.was_interrupted():
        if is_single_process or is_first():
            _show_interrupt(before, error)
        if not issubclass(kind, KeyboardInterrupt):  # but what follows from peers that have ended
            sys.stderr.flush()
            os._exit(interrupt.INTERRUPTED)
        if not is_single_process:
            _end_soon(INTERRUPT_EXIT_S)
        return
    error = in_words(error)
    is_bad_input = isinstance(error, MerakError) and not isinstance(error, TrainingError)
    if is_single_process:
        _show(before, error)
        advise()
        tell_launcher(error)
        if is_bad_input and not (sys.flags.interactive or hasattr(sys, "ps1")):
            _end_with(BAD_INPUT)  # Python's own code, else
        return
    if is_lost_connection(error):
        error = TrainingError(why_lost(error)).with_traceback(trace)
    if is_first():
        _show(before, error)
        advise()
        _tell_of_restart()
        tell_launcher(error)
    else:
        time.sleep(LAUNCHER_S)
    _end_with(BAD_INPUT if is_bad_input else FAILED)


def _report_in_thread(
    before: Callable[[threading.ExceptHookArgs], object], failed: threading.ExceptHookArgs
) -> None:
    """Report an exception that ends a thread; without one of Merak's own, the job cannot go on.

    What ends a thread of the script's is reported and ends nothing else, as everywhere in Python.
    """
    before(failed)
    if failed.thread is not None and failed.thread.name.startswith(THREADS):
        sys.stderr.flush()
        os._exit(1)


def restarts_left() -> int:
    """Return how many times torchrun will start the ranks of this host again."""
    made = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return max(0, int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) - made)


def _tell_of_restart() -> None:
    """Say what a job of several hosts waits for now, since torchrun itself says nothing."""
    if restarts_left() and int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1:
        write_line(
            "merak: torchrun starts the ranks again. If a host is lost and --nnodes needs it, the "
            "job waits for another host: run the same command there again."
        )


def why_lost(error: BaseException) -> str:
    """Explain a lost connection to another rank in a sentence, after the launcher's grace time.

    Args:
        error: what torch raised.
    """
    reason = _first_line(error)
    with phase("finding out why it has lost a connection"):
        for why in _explainers:
            return why(reason)
        time.sleep(LAUNCHER_S)
    return LOST.format(rank=os.environ["RANK"], reason=reason)


def _show(before: Hook, error: BaseException) -> None:
    if isinstance(error, MerakError):
        for locate in _locators:
            locate(error)
    if isinstance(error, MerakError) and not os.environ.get(TRACEBACK_VARIABLE):
        write_line(sentence_of(error))
    else:
        before(type(error), error, error.__traceback__)


def _show_interrupt(before: Hook, error: BaseException) -> None:
    if os.environ.get(TRACEBACK_VARIABLE):
        before(type(error), error, error.__traceback__)
    else:
        write_line(f"\n{interrupt.SENTENCE}")


def is_first(store: Store | None = None) -> bool:
    """Whether no other rank has failed before, so that one of many sentences is shown.

    Args:
        store: a connection to the job's store; found if it is not given.
    """
    rank = os.environ["RANK"]
    try:
        if store is None and not job_store.has_joined():
            return _is_first_of_start(job_store.agents(), rank)
        known = store if store is not None else job_store.shared()
        return bool(known.compare_set(KEY, "", rank) == rank.encode())
    except Exception:
        return True  # nobody to ask: rather say it twice than never


def _is_first_of_start(agents: Store, rank: str) -> bool:
    """Tell the same before ranks have joined, in a store with the keys of earlier attempts too.

    What failed before this process started belongs to an earlier attempt.
    """
    own, known = f"{time.time()} {rank}", ""
    while (found := agents.compare_set(EARLY_KEY, known, own).decode()) != own:
        time_s, first = found.split()
        if float(time_s) >= _start_s():
            return first == rank
        known = found
    return True


def _start_s() -> float:
    """Return when this process started, by the clock; where unknown, when it imported Merak."""
    with suppress(OSError, AttributeError):
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        started_s = float(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)
    return _IMPORTED_S


def tell_launcher(error: BaseException) -> None:
    """Write the error file that torchrun quotes in its report of the failure."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    summary = f"{type(error).__name__}, which this rank has told in its own output"
    extra = {"py_callstack": summary, "timestamp": str(int(time.time()))}
    content = json.dumps({"message": {"message": summary, "extraInfo": extra}})
    with suppress(OSError):  # the report then only lacks a line
        Path(path).write_text(content, encoding="utf-8")


def _end_with(code: int) -> None:
    """End this process with an exit code when its hooks are done, in a limited time.

    Threads of communication libraries may wait for ranks that never come, also while Python ends.
    """
    _end_soon(EXIT_S + INTERRUPT_EXIT_S)  # where even the threads below cannot run
    limit = threading.Timer(EXIT_S, os._exit, (code,))
    limit.daemon = True
    limit.start()
    threading.Thread(target=_end_as_python, args=(code,)).start()


def _end_as_python(code: int) -> None:
    """Join the script's own threads, call what it has registered for the end, and end."""
    threading.main_thread().join()  # until Python ends: torch's hook prints what ours has said
    for other in threading.enumerate():
        if not other.daemon and other not in (threading.main_thread(), threading.current_thread()):
            other.join()
    with suppress(Exception):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


def _end_soon(limit_s: float = EXIT_S) -> None:
    """End this process after a limit, without waiting for transfers of peers that never answer."""
    if hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, limit_s)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
