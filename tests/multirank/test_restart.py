"""torchrun starts the ranks of a job again after a fault: on one host, and where one of two fails.

Two agents of one machine stand for two hosts.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("restart_jobs.py")
SOURCE = Path(__file__).parents[2] / "src"
PATIENCE_S = 300.0


def start(arguments: list[str], script: list[str]) -> subprocess.Popen[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--max-restarts=2", *arguments]
    variables = {name: v for name, v in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        [*launcher, *script],
        env=variables | {"PYTHONPATH": str(SOURCE), "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(agents: list[subprocess.Popen[str]]) -> list[str]:
    """What the agents and their ranks have said."""
    try:
        return [agent.communicate(timeout=PATIENCE_S)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()


@pytest.mark.slow
def test_a_rank_that_dies_is_started_again(tmp_path: Path) -> None:
    job = start(["--standalone", "--nproc-per-node=2"], [str(SCRIPT), "1", str(tmp_path)])
    said = ended([job])
    assert job.returncode == 0, said
    found = {file.name for file in tmp_path.iterdir()}
    assert found == {"has failed", "rank 0 restarts 1", "rank 1 restarts 1"}


@pytest.mark.slow
@pytest.mark.parametrize("failing", ["0", "1"])
def test_of_two_hosts_one_fails(failing: str, tmp_path: Path) -> None:
    """Only the failed host's agent counts the restart; ranks agree on the attempt all the same."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        endpoint = f"--rdzv-endpoint=127.0.0.1:{listening.getsockname()[1]}"
    options = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--local-addr=127.0.0.1"]
    script = [str(SCRIPT), failing, str(tmp_path)]
    agents = [start([*options, endpoint], script) for _ in range(2)]
    said = ended(agents)
    assert [agent.returncode for agent in agents] == [0, 0], said
    found = {file.name for file in tmp_path.iterdir()} - {"has failed"}
    assert len(found) == 2
    assert {name[-1] for name in found} == {"0", "1"}, said  # what made a prefix hang
