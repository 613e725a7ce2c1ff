"""Ctrl-C: one line, exit 130, and a second one that does not wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from merak.core.health import interrupt, signals

SOURCE = Path(__file__).parents[2] / "src"


def start(folder: Path, code: str, command: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """A script in a process group of its own, as a terminal has it, that has printed a line."""
    script = folder / "script.py"
    script.write_text(code)
    return subprocess.Popen(
        [sys.executable, *command, str(script), str(folder)],
        env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=_as_in_a_terminal,
    )


def _as_in_a_terminal() -> None:
    """Let an interrupt through, which shells have their background jobs ignore."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def interrupted(process: subprocess.Popen[str], folder: Path, num_ranks: int) -> str:
    """What is said when an interrupt comes once all ranks are ready."""
    deadline = time.monotonic() + 300
    while len(list(folder.glob("ready-*"))) < num_ranks:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    try:
        return process.communicate(timeout=120)[1]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


ALONE = """
import sys, time
from pathlib import Path
from merak.core.health import failure
failure.install()
Path(sys.argv[1], "ready-0").touch()
time.sleep(600)
"""


def test_a_process_says_one_line(tmp_path: Path) -> None:
    process = start(tmp_path, ALONE)
    assert interrupted(process, tmp_path, 1) == f"\n{interrupt.SENTENCE}\n"
    assert process.returncode in (-signal.SIGINT, interrupt.INTERRUPTED)


# Rank 1 waits inside gloo, where Python sees no signal.
RANKS = """
import os, sys, time
from datetime import timedelta
from pathlib import Path
import torch.distributed as dist
from merak.core.health import failure

def work(folder):
    failure.install()
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    dist.barrier()
    Path(folder, f"ready-{dist.get_rank()}").touch()
    if dist.get_rank() == 1:
        dist.barrier()
    time.sleep(600)
"""
UNDER_TORCHRUN = RANKS + "\nwork(sys.argv[1])\n"
COMMAND = (
    RANKS
    + """
from merak.launch.ranks import Work, run_ranks
from merak.cli.main import app, main

@app.command("hold")
def hold(folder: str) -> None:
    run_ranks(Work(work, (folder,)), 2)

if __name__ == "__main__":
    sys.exit(main(["hold", sys.argv[1]]))
"""
)


@pytest.mark.slow
def test_of_torchruns_ranks_one_says_one_line(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    said = interrupted(start(tmp_path, UNDER_TORCHRUN, torchrun), tmp_path, 2)
    assert said.count(interrupt.SENTENCE) == 1
    # torchrun itself, which is no rank, tells of its own end.
    assert said.count("Traceback") == said.count("SignalException: Process") <= 1
    assert "script.py" not in said


@pytest.mark.slow
def test_a_command_that_runs_ranks_says_one_line(tmp_path: Path) -> None:
    process = start(tmp_path, COMMAND)
    assert interrupted(process, tmp_path, 2) == f"\n{interrupt.SENTENCE}\n"
    assert process.returncode == interrupt.INTERRUPTED


@pytest.mark.parametrize(
    ("arrivals_s", "ends"),
    [((10.0,), False), ((10.0, 10.2), False), ((10.0, 10.2, 15.0), True), ((10.0, 11.5), True)],
    ids=["one", "sent on by the launcher", "second", "second at once"],
)
def test_a_second_interrupt_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, arrivals_s: tuple[float, ...], ends: bool
) -> None:
    read, write = os.pipe()
    os.write(write, bytes([signal.SIGUSR1, *[signal.SIGINT] * len(arrivals_s)]))
    os.close(write)
    codes: list[int] = []
    times = iter(arrivals_s)
    monkeypatch.setattr(interrupt, "_interrupts", interrupt._Interrupts())
    monkeypatch.setattr(signals, "_receivers", {signal.SIGINT: interrupt._record})
    monkeypatch.setattr(interrupt.time, "monotonic", lambda: next(times))
    monkeypatch.setattr(interrupt.os, "_exit", codes.append)
    assert not interrupt.was_interrupted()
    signals._read(read)
    os.close(read)
    assert interrupt.was_interrupted()
    assert bool(codes) is ends and {*codes} <= {interrupt.INTERRUPTED}
