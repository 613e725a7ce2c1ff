"""No rank of a job on one machine listens where another machine can reach it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from merak.launch.ranks import Work, run_ranks
from tests.multirank import listening_job

SCRIPT = Path(listening_job.__file__)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_ranks_of_the_command_line_listen_on_the_loopback_interface() -> None:
    """As `merak train` starts them; the launcher's own store included."""
    own, exposed, exposed_of_launcher = run_ranks(Work(listening_job.train, ()), 2)
    assert own
    assert exposed == []
    assert exposed_of_launcher == []


@pytest.mark.slow
def test_ranks_under_torchrun_listen_on_the_loopback_interface() -> None:
    """gloo would take the interface that the host's name resolves to."""
    left_out = ("RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    root = SCRIPT.parents[2]
    environment |= {"PYTHONPATH": f"{root / 'src'}:{root}", "PYTHONWARNINGS": "ignore"}
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    done = subprocess.run(
        [sys.executable, *launcher, str(SCRIPT)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = re.findall(r"LISTENS (\[.*?\]) (\[.*?\]) lo", done.stdout)
    assert len(lines) == 2, done.stderr
    assert all(own != "[]" and exposed == "[]" for own, exposed in lines), lines
