"""Ranks of this machine, started with torch's elastic launcher; a failure is reported once."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from merak.core.doctor.finding import System
from merak.core.doctor.memory import read_memory
from merak.core.errors import (
    CommandError,
    MerakError,
    RunError,
    StartError,
    TerminatedError,
    TrainingError,
)
from merak.core.files.private_files import write_aside
from merak.core.health.failure import (
    BAD_INPUT,
    FAILED,
    in_words,
    is_lost_connection,
    starting,
    why_lost,
)
from merak.core.health.heartbeat import GLOO
from merak.core.health.interrupt import INTERRUPTED, listen, was_interrupted
from merak.core.health.preemption import TERMINATED
from merak.core.health.status import at_first_step
from merak.core.health.stderr import write_line
from merak.core.health.store import LOOPBACK, loopback_interface
from merak.core.units import size
from merak.launch import rendezvous
from merak.launch.forkserver import THREADS, environment, num_threads, quiet_tracker, start_method

Result = TypeVar("Result")

STEPPED = "stepped"
"""File that a rank makes in the folder of a run when it has run a step."""

RANK_BYTES = 2**26
"""Memory that a process of torch takes at least, beside what it shares with others."""

TORCH_SPAWN = "multiprocessing.spawn"


@dataclass(frozen=True, slots=True)
class Work(Generic[Result]):
    """Function that every rank runs, and its arguments.

    Args:
        function: a function of a module, so that new processes find it.
        arguments: what it is called with; travels by pickle.
    """

    function: Callable[..., Result]
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Failure:
    """End of a rank that failed.

    Args:
        rank: which one.
        time_s: when, by the clock.
        sentence: what is reported of it.
        is_bad_input: whether it is an error of the user's input.
    """

    rank: int
    time_s: float
    sentence: str
    is_bad_input: bool


def under_torchrun() -> bool:
    """Whether this process is already one of the ranks."""
    return "RANK" in os.environ


def run_ranks(work: Work[Result], num_ranks: int, max_restarts: int = 0) -> Result:
    """Run a function on new ranks of this machine.

    Args:
        work: what every rank does.
        num_ranks: how many.
        max_restarts: how often all ranks are started again after one has failed.

    Returns:
        What rank 0 returned.

    Raises:
        CommandError: this machine has no room for so many.
        MerakError: a rank found its input bad; the first one's sentence.
        RunError: training could not go on, or a rank failed otherwise: the first one's sentence,
            traceback or signal. It is a `StartError` where no rank had run a step.
        TerminatedError: SIGTERM has ended the ranks.
    """
    check_room(num_ranks)
    with tempfile.TemporaryDirectory(prefix="merak-run-") as folder, quiet_launcher(is_alone=True):
        os.environ.setdefault(THREADS, num_threads(num_ranks))
        try:
            results = elastic_launch(_launch_config(num_ranks, max_restarts), _rank)(
                work, Path(folder)
            )
        except ChildFailedError as error:
            raise _first_cause(Path(folder), error) from None
    result: Result = results[0]
    return result


def check_room(num_ranks: int, system: System | None = None) -> None:
    """Refuse more ranks than the memory of this machine has processes of torch.

    Args:
        num_ranks: to be started here.
        system: whose memory it is; by default this machine's.

    Raises:
        CommandError: there are more.
    """
    whole = read_memory(system or System()).whole_bytes
    if whole and num_ranks * RANK_BYTES > whole:
        raise CommandError(
            f"{num_ranks:,} ranks do not find room on this machine, whose {size(whole)} of memory "
            f"are enough for {whole // RANK_BYTES:,} at most; lower the degrees, or start ranks on "
            "several machines with torchrun."
        )


def _launch_config(num_ranks: int, max_restarts: int) -> LaunchConfig:
    rendezvous.register()
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend=rendezvous.BACKEND,
        rdzv_endpoint="",
        local_addr=LOOPBACK,
        max_restarts=max_restarts,
        start_method=start_method(),
    )


def _rank(work: Work[Result], folder: Path) -> Result:
    """Run one rank: it writes its result, or a note of its failure and ends so that others stop."""
    os.dup2(2, 1)  # standard output belongs to the result, which the launcher prints
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where it was forked from
    # As under torchrun. A rank takes over how it was started itself, and with that each worker of
    # its data loaders would import everything anew.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    listen()
    at_first_step((folder / STEPPED).touch)
    _report_restart(folder)
    code = FAILED
    try:
        with starting(lambda: None):  # the command advises, once
            return work.function(*work.arguments)
    except MerakError as error:
        is_bad_input = not isinstance(error, TrainingError)
        _note(folder, str(error), is_bad_input=is_bad_input)
        code = BAD_INPUT if is_bad_input else code
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) or was_interrupted():
            os._exit(INTERRUPTED)  # the command says so
        if isinstance(error, SystemExit) and error.code == TERMINATED:
            os._exit(TERMINATED)  # likewise
        worded = in_words(error)
        if worded is not error:
            reported = f"rank {os.environ['RANK']} on {socket.gethostname()}: {worded}"
        elif is_lost_connection(error):
            reported = why_lost(
                error
            )  # meanwhile the launcher stops this rank if it knows the cause
        else:
            reported = f"rank {os.environ['RANK']} failed:\n{traceback.format_exc().rstrip()}"
        _note(folder, reported, is_bad_input=False)
    # Not sys.exit: threads of a communication library may wait for ranks that never come.
    sys.stderr.flush()
    os._exit(code)


def _report_restart(folder: Path) -> None:
    """Report why ranks have been started again; what bad input has ended once, it ends for good."""
    attempt, rank = _attempt(), int(os.environ["RANK"])
    if not attempt:
        return
    before = min(_notes(folder, attempt - 1), key=lambda failure: failure.time_s, default=None)
    if before is not None and before.is_bad_input:
        _note(folder, before.sentence, is_bad_input=True)
        os._exit(1)
    if rank == 0:
        why = "a rank has ended" if before is None else before.sentence
        most = os.environ["TORCHELASTIC_MAX_RESTARTS"]
        write_line(f"\nmerak: {why}\n[merak] restart {attempt} of {most} …")


def _attempt() -> int:
    """Number of restarts before this start of the ranks."""
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def _notes(folder: Path, attempt: int) -> list[Failure]:
    """Notes of the ranks that failed in an attempt."""
    files = folder.glob(f"failure-{attempt}-*.json")
    return [Failure(**json.loads(file.read_text(encoding="utf-8"))) for file in files]


def _note(folder: Path, sentence: str, *, is_bad_input: bool) -> None:
    rank = int(os.environ["RANK"])
    failure = Failure(rank, time.time(), sentence, is_bad_input)
    path = folder / f"failure-{_attempt()}-{rank}.json"
    write_aside(path, json.dumps(asdict(failure)).encode())


def _first_cause(folder: Path, error: ChildFailedError) -> Exception:
    attempts = [int(file.name.split("-")[1]) for file in folder.glob("failure-*.json")]
    rank, ended = error.get_first_failure()
    noted = _notes(folder, max(attempts, default=0))
    failed = RunError if (folder / STEPPED).exists() else StartError
    if ended.exitcode in (TERMINATED, -signal.SIGTERM):
        # The launcher sends it as well, to those that are left when a rank has found bad input.
        noted = [failure for failure in noted if failure.is_bad_input]
        if not noted:
            return TerminatedError("SIGTERM has ended the job.")
    elif all(failure.rank != rank for failure in noted):
        # A rank that was killed leaves no note; what the others noted follows from it.
        return failed(f"rank {rank} {how_ended(ended)}; look above for what it last said.")
    first = min(noted, key=lambda failure: failure.time_s)
    return (MerakError if first.is_bad_input else failed)(first.sentence)


def how_ended(ended: ProcessFailure) -> str:
    """Describe the end of a process without a note, as the rest of a sentence that begins with it.

    Args:
        ended: what the launcher knows of it.
    """
    if ended.exitcode >= 0:
        return f"ended with exit code {ended.exitcode}"
    name = ended.signal_name()
    if -ended.exitcode == signal.SIGKILL:
        return f"was killed by {name}: by the kernel for its memory (see dmesg), or by somebody"
    return f"was ended by {name}"


@contextmanager
def quiet_launcher(is_alone: bool) -> Iterator[None]:
    """Suppress the launcher's log of failures, which repeats that of every rank.

    Args:
        is_alone: whether all ranks are on this machine.

    Raises:
        TerminatedError: SIGTERM has ended the launcher.
        KeyboardInterrupt: another signal has.
    """
    parts = ("torch.distributed.elastic", f"torch.{TORCH_SPAWN}")
    known = [name for name in logging.root.manager.loggerDict if name.startswith(parts)]
    # Each of the launcher's has a level of its own.
    loggers = [logging.getLogger(name) for name in dict.fromkeys((*parts, *known))]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        # Ranks of one machine meet on its loopback interface, which no other machine can reach.
        interface = os.environ.get(GLOO, loopback_interface() if is_alone else None)
        with environment(
            PYTHONWARNINGS=quiet_tracker(), **({GLOO: interface} if interface else {})
        ):
            yield
    except SignalException as error:
        if error.sigval == signal.SIGTERM:
            raise TerminatedError("SIGTERM has ended the job.") from None
        raise KeyboardInterrupt from error
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
