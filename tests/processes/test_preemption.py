"""SIGTERM in a single process and in a job whose other ranks are threads' keys in a store."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from merak.core.health import preemption
from merak.core.health import store as job_store
from tests.processes.forked import SOURCE, run_script

Run = Callable[[str], subprocess.CompletedProcess[str]]
START = """
import os, signal, sys, threading, time
from merak.core.health import preemption
preemption.listen()
def term(): os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def run(code: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "script.py").write_text(START + code)
        return run_script(tmp_path / "script.py", {"PYTHONPATH": str(SOURCE)})

    return run


def test_where_nothing_trains_it_ends_the_process(run: Run) -> None:
    done = run("term()\ntime.sleep(600)")
    assert done.returncode == preemption.TERMINATED
    assert done.stderr == ""


def test_a_loop_stops_before_its_next_step(run: Run) -> None:
    done = run("""
with preemption.saves_on_sigterm(100.0):
    for step in range(1000):
        if preemption.must_stop():
            preemption.has_saved()
            print("saved after", step)
            sys.exit(preemption.TERMINATED)
        if step == 3:
            term()
            while not preemption._stop.is_requested: time.sleep(0.01)
""")
    assert done.returncode == preemption.TERMINATED
    assert done.stdout == "saved after 4\n"


def test_before_the_first_step_it_ends_the_process(run: Run) -> None:
    done = run("with preemption.saves_on_sigterm(1000.0):\n    term()\n    time.sleep(600)")
    assert done.returncode == preemption.TERMINATED
    assert done.stderr == ""


def test_a_step_that_does_not_end_ends_at_the_limit(run: Run) -> None:
    done = run("""
with preemption.saves_on_sigterm(0.5):
    preemption.must_stop()
    term()
    time.sleep(600)
""")
    assert done.returncode == preemption.TERMINATED
    assert "took longer than sigterm_limit_s=0.5; the job ends without that" in done.stderr


def test_a_second_one_ends_at_once(run: Run) -> None:
    done = run("""
preemption.SAME_S = 0.0
with preemption.saves_on_sigterm(1000.0):
    term()
    while not preemption._stop.is_requested: time.sleep(0.01)
    term()
    time.sleep(600)
""")
    assert done.returncode == preemption.TERMINATED


def test_a_scripts_own_handler_is_left_alone(run: Run) -> None:
    done = run("""
signal.signal(signal.SIGTERM, lambda *_: print("own"))
preemption.listen()
term()
time.sleep(0.2)
""")
    assert (done.returncode, done.stdout) == (0, "own\n")


def test_a_forked_process_ends_by_default(run: Run) -> None:
    done = run("""
read, write = os.pipe()
pid = os.fork()
if not pid:
    os.write(write, b"ready")
    time.sleep(600)
os.read(read, 5)
os.kill(pid, signal.SIGTERM)
print(os.waitpid(pid, 0)[1])
""")
    assert (done.returncode, done.stdout) == (0, f"{int(signal.SIGTERM)}\n")


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """The store of a job of three ranks, of which this process is rank 1."""
    store = dist.HashStore()
    monkeypatch.setattr(preemption, "_stop", preemption._Stop())
    # Where the limit passes, it ends the process, with all tests behind this one.
    monkeypatch.setattr(preemption, "_end_at", lambda limit_s: None)
    monkeypatch.setattr(job_store, "connect", lambda: store)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    return store


def test_ranks_stop_before_the_step_that_none_has_begun(job: dist.Store) -> None:
    begun = threading.Event()
    stopped: list[int] = []

    def train() -> None:
        for step in range(1, 100):
            if preemption.must_stop():
                stopped.append(step)
                preemption.has_saved()
                return
            begun.set()
            while step == 2 and not preemption._stop.is_requested:
                preemption.look(job)

    with preemption.saves_on_sigterm(1000.0):
        loop = threading.Thread(target=train)
        loop.start()
        assert begun.wait(60.0)
        job.set(f"{preemption.KEY}/0", "3")
        job.set(f"{preemption.KEY}/2", "7")  # this rank is ahead
        job.set(preemption.KEY, "0")
        loop.join(60.0)
    assert stopped == [7]
    assert job.get(f"{preemption.KEY}/1") == b"3"
