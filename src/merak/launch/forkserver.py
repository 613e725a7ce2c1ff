"""Forkserver of ranks: a process that has already imported what they need.

A rank that begins as a new Python imports torch and transformers for some five seconds, and all
ranks of a machine do so beside one another. Here one further process does, while the command works;
ranks are forked from it. It never computes, since threads and devices do not outlive a fork.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from typing import Any

FROM_IMPORTED = "forkserver"
FROM_NOTHING = "spawn"
"""multiprocessing's names of the two ways to start a process."""

PRELOADED = ("merak.zoo.check_by_name", "merak.engine.build", "torch._dynamo", "torch.distributed")
"""Modules that are imported once for all ranks."""

THREADS = "OMP_NUM_THREADS"
TRACKER_WARNINGS = "ignore::UserWarning:multiprocessing.resource_tracker"


@contextmanager
def ranks_prepared(num_ranks: int) -> Iterator[None]:
    """Start a process that imports what ranks need, and let ranks fork from there.

    This process computes with as many threads as each of them does: more would wait for one another
    wherever they share cores with that process.

    Args:
        num_ranks: how many there will be.
    """
    if num_ranks < 1 or "RANK" in os.environ:  # degrees to be refused; or torchrun's ranks
        yield
        return
    os.environ.setdefault(THREADS, num_threads(num_ranks))
    if sys.platform != "linux":  # elsewhere the system's own libraries do not stand a fork
        yield
        return
    forkserver.set_forkserver_preload(list(PRELOADED))
    with environment(PYTHONWARNINGS=quiet_tracker()), _interrupts_ignored():
        forkserver.ensure_running()
    try:
        yield
    finally:
        _end()


def start_method() -> str:
    """Return multiprocessing's start method of ranks."""
    import torch

    # A process that has initialised devices, as some imports do, cannot share them with its forks.
    if _pid() is None or torch.accelerator.is_available():
        return FROM_NOTHING
    return FROM_IMPORTED


def num_threads(num_ranks: int) -> str:
    """Return the number of threads of each rank of this machine."""
    return str(max(1, (os.cpu_count() or 1) // num_ranks))


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Set environment variables for processes that start inside."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def quiet_tracker() -> str:
    """Return PYTHONWARNINGS for ranks: one that ends at once leaks semaphores."""
    return ",".join(filter(None, (os.environ.get("PYTHONWARNINGS"), TRACKER_WARNINGS)))


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Let processes that start inside ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _server() -> Any:
    return forkserver._forkserver


def _pid() -> int | None:
    found: int | None = _server()._forkserver_pid
    return found


def _end() -> None:
    """Kill the server now: whoever reads our output waits for its end."""
    pid = _pid()
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
        _server()._stop()
