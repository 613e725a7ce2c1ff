"""Faults at random moments of a job under torchrun: the losses are those of a job without any.

One torchrun starts the ranks again after each fault, and the next attempt meets the next one.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.multirank import fault_jobs

SOURCE = Path(__file__).parents[2]
MARK = "FAULT_JOB"
"""Environment variable by which the processes of a job are found."""

Fault = tuple[str, str, int, int]
"""Kind, moment, number of the call, and rank."""

DEADLY = sorted(set(fault_jobs.FAULTS) - {"thread"})
MOMENTS = ("forward", "backward", "reduction", "evaluation", "save")
SLOW = ("stop", "gil")
"""Kinds that take the other ranks' limit, and torchrun's grace."""

STEPS_OF_AN_ATTEMPT = 4
"""Steps that an attempt trains on at most until its fault."""


@dataclass(frozen=True)
class Ended:
    """How a job ended: the exit code of torchrun, what was said, and the losses by step."""

    code: int
    said: str
    losses: dict[str, set[str]]


def run(folder: Path, num_steps: int, faults: Sequence[Fault], limit_s: float) -> Ended:
    """Run the job, and see that it leaves nothing."""
    folder.mkdir()
    (folder / "faults.json").write_text(json.dumps(faults))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    restarts = [f"--max-restarts={len(faults)}", fault_jobs.__file__, str(folder), str(num_steps)]
    variables = {name: v for name, v in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    variables |= {"PYTHONPATH": f"{SOURCE}/src:{SOURCE}", MARK: str(folder)}
    shared_before = set(os.listdir("/dev/shm"))
    log = folder / "said"
    with log.open("w") as said:
        job = subprocess.Popen(
            [sys.executable, *launcher, *restarts], env=variables, stdout=said, stderr=said
        )
        try:
            job.wait(limit_s)
        finally:
            job.kill()
            job.wait()
    text = log.read_text()
    assert processes(folder) == [], text
    with socket.socket() as listening:  # which fails while another one listens there
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", int((folder / "port").read_text())))
    left = set(os.listdir("/dev/shm")) - shared_before
    assert not [name for name in left if is_ours(name)], left
    partial = [path.name for path in (folder / "run").iterdir() if path.name.startswith(".")]
    assert partial == [], text
    return Ended(job.returncode, text, losses(folder))


def processes(folder: Path) -> list[int]:
    """Processes of a job that live after a moment's grace: loader workers see their parent end."""
    wanted = f"{MARK}={folder}".encode()
    deadline = time.monotonic() + 30.0
    while True:
        found = []
        for environ in Path("/proc").glob("[0-9]*/environ"):
            try:
                if wanted in environ.read_bytes().split(b"\0"):
                    found.append(int(environ.parent.name))
            except OSError:
                continue  # it has ended meanwhile, or is not ours
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def is_ours(name: str) -> bool:
    """Whether shared memory is torch's, of a process that has ended."""
    number = name.removeprefix("torch_").partition("_")[0]
    return name.startswith("torch_") and not Path(f"/proc/{number}").exists()


def losses(folder: Path) -> dict[str, set[str]]:
    """All losses of a step that any attempt has logged."""
    found: dict[str, set[str]] = {}
    for line in (folder / "losses").read_text().splitlines():
        name, step, loss, _ = line.split()
        found.setdefault(f"{name} {step}", set()).add(loss)
    return found


def planned(seed: int, num_faults: int) -> list[Fault]:
    """Every kind and every moment in turn, in random order, at random calls on random ranks."""
    draw = random.Random(seed)
    kinds = [DEADLY[number % len(DEADLY)] for number in range(num_faults)]
    moments = [MOMENTS[number % len(MOMENTS)] for number in range(num_faults)]
    draw.shuffle(kinds)
    draw.shuffle(moments)
    # Calls of two microbatches a step, an evaluation every 3 steps, a save every 2.
    calls = {"forward": 6, "backward": 6, "reduction": 3, "evaluation": 1, "save": 1}
    return [
        (kind, moment, draw.randrange(calls[moment]), draw.randrange(2))
        for kind, moment in zip(kinds, moments, strict=True)
    ]


def check(tmp_path: Path, faults: Sequence[Fault], limit_s: float) -> None:
    print(f"{faults=}")  # which pytest shows if it fails
    num_steps = STEPS_OF_AN_ATTEMPT * len(faults)
    whole = run(tmp_path / "whole", num_steps, [("thread", "forward", 3, 0)], limit_s)
    assert whole.code == 0, whole.said
    assert "raised in a thread of the script's own" in whole.said
    assert "fault-0" in os.listdir(tmp_path / "whole")
    faulty = run(tmp_path / "faulty", num_steps, faults, limit_s)
    met = [name for name in os.listdir(tmp_path / "faulty") if name.startswith("fault-")]
    assert faulty.code == 0, faulty.said
    assert len(met) == len(faults), faulty.said
    assert {name for name in os.listdir(tmp_path / "faulty") if name.startswith("ended-")} == {
        "ended-0",
        "ended-1",
    }
    assert faulty.losses == whole.losses  # to the last bit, however often a step was repeated
    # Hangs cannot be told from what was said; every other fault that has a sentence has one.
    assert faulty.said.count("; the job ends.") >= sum(kind in SLOW for kind, *_ in faults)


@pytest.mark.slow
def test_a_job_survives_every_kind_of_fault(tmp_path: Path) -> None:
    check(tmp_path, planned(seed=18, num_faults=len(DEADLY)), 1800.0)


@pytest.mark.slow
def test_states_in_files_survive_kills_and_full_disks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT_OPTIMIZER", "states")
    faults = [("kill", "states", 20, 1), ("disk", "states", 30, 0), ("disk", "save", 0, 0)]
    check(tmp_path, faults, 900.0)
    said = (tmp_path / "faulty" / "said").read_text()
    assert "is full: it has" in said and "resume from the last checkpoint" in said
    assert list((tmp_path / "faulty" / "states").iterdir()) == []


@pytest.mark.soak
def test_a_job_survives_200_faults(tmp_path: Path) -> None:
    check(tmp_path, planned(seed=int(time.time()), num_faults=200), 4 * 3600.0)
