"""Jobs on two hosts, which are network namespaces: placement, folders, and a host that is lost."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from merak.core.start.init import OWN_STORE
from tests.multirank.network import Network, script_environment, until, wait_for

pytestmark = pytest.mark.slow
SCRIPT = str(Path(__file__).with_name("host_jobs.py"))
PATIENCE_S = 300.0

Job = list[subprocess.Popen[bytes]]


def job(folder: Path, dp: int, tp: int, pp: int, **options: Any) -> list[str]:
    """The script and its arguments, as a user would type them."""
    return [SCRIPT, str(folder), str(dp), str(tp), str(pp), json.dumps(options)]


def start(network: Network, script: list[str], folder: Path, ranks: tuple[int, int]) -> Job:
    return [
        host.torchrun(number, script, folder / f"{host.name}.log")
        for host, number in zip(network.hosts, ranks)
    ]


def told(folder: Path) -> str:
    """What both hosts have printed."""
    return "\n".join(
        file.read_text(encoding="utf-8", errors="replace") for file in sorted(folder.glob("*.log"))
    )


def ends(running: Job, folder: Path) -> list[int]:
    """The exit codes of torchrun on both hosts."""
    try:
        return [process.wait(PATIENCE_S) for process in running]
    except subprocess.TimeoutExpired:
        raise AssertionError(told(folder)) from None


def losses(folder: Path) -> list[float]:
    lines = (folder / "losses.jsonl").read_text(encoding="utf-8").splitlines()
    found = {line["step"]: line["loss"] for line in map(json.loads, lines)}
    return [found[step] for step in sorted(found)]


@pytest.mark.parametrize(
    ("degrees", "ranks", "across"),
    [
        ((2, 1, 2), (2, 2), "4 ranks on 2 hosts (2 ranks on host-a, 2 on host-b) (cpu): "
         "dp 2 × tp 1 × pp 2, with pp across hosts"),
        ((1, 2, 3), (2, 4), "dp 1 × tp 2 × pp 3, with pp across hosts"),
        ((1, 2, 2), (1, 3), "start a multiple of 2 ranks on every host, or use a tp that divides"),
    ],
)  # fmt: skip
def test_a_job_trains_on_two_hosts(
    degrees: tuple[int, int, int],
    ranks: tuple[int, int],
    across: str,
    network: Network,
    tmp_path: Path,
) -> None:
    script = job(tmp_path, *degrees, arguments={"max_steps": 3})
    assert ends(start(network, script, tmp_path, ranks), tmp_path) == [0, 0], told(tmp_path)
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    # torchrun numbers hosts in the order in which they come.
    said = told(tmp_path).replace("host-b", "host-a")
    for part in across.replace("host-b", "host-a").split("2 ranks on host-a, 2 on host-a"):
        assert part in said
    assert len(losses(tmp_path)) == 3


def test_hosts_without_a_shared_folder_are_refused_before_anything_is_built(
    network: Network, tmp_path: Path
) -> None:
    for folder in ("output", "elsewhere"):
        (tmp_path / folder).mkdir()
    network.hosts[1].mounts[tmp_path / "output"] = tmp_path / "elsewhere"
    script = job(tmp_path, 2, 1, 1, arguments={"max_steps": 2, "save_strategy": "steps"})
    codes = ends(start(network, script, tmp_path, (1, 1)), tmp_path)
    said = told(tmp_path)
    assert 0 not in codes
    sentences = [line for line in said.splitlines() if "merak: output_dir=" in line]
    assert len(sentences) == 1, said
    assert "is not one folder for all ranks: rank 1 (host-" in sentences[0]
    assert "name a folder on a file system that all hosts share" in sentences[0]
    assert "tracing" not in said
    assert not [*(tmp_path / "output").iterdir(), *(tmp_path / "elsewhere").iterdir()]


def test_last_weights_are_read_where_they_are_and_nowhere_waited_for(
    network: Network, tmp_path: Path
) -> None:
    for folder in ("output", "elsewhere"):
        (tmp_path / folder).mkdir()
    network.hosts[1].mounts[tmp_path / "output"] = tmp_path / "elsewhere"
    script = job(tmp_path, 1, 1, 4, arguments={"max_steps": 2, "save_strategy": "no"}, uses=True)
    codes = ends(start(network, script, tmp_path, (2, 2)), tmp_path)
    said = told(tmp_path)
    assert codes == [0, 0], said
    first = "host-a" if "rank 0 of host-a" in said else "host-b"  # in the order in which they come
    last = tmp_path / "output" / "last-weights"
    assert f"the weights of step 2 are in {last} on {first}, where state_dict()" in said
    for rank in range(2):
        assert f"state_dict on rank {rank} of {first} gives " in said
    second = "host-b" if first == "host-a" else "host-a"
    for rank in range(2, 4):
        why = f"they are in {last} on {first}, not on {second}; call it on a rank there"
        assert re.search(rf"state_dict on rank {rank} of .* {re.escape(why)}", said)
        for name in ("save_pretrained", "_save"):  # of which transformers saves on rank 0 alone
            assert f"{name} on rank {rank} of {second} gives None" in said
    own = tmp_path / ("output" if first == "host-a" else "elsewhere")
    names = {"last-weights", "pretrained", "saved", "model"}
    assert names <= {file.parent.name for file in own.rglob("model.safetensors")}


def test_a_host_that_loses_the_shared_folder_leaves_no_checkpoint(
    network: Network, tmp_path: Path
) -> None:
    for folder in ("output", "elsewhere"):
        (tmp_path / folder).mkdir()
    arguments = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    script = job(tmp_path, 2, 1, 1, arguments=arguments, unmounts="host-b")
    assert 0 not in ends(start(network, script, tmp_path, (1, 1)), tmp_path)
    said = told(tmp_path)
    assert len([line for line in said.splitlines() if "merak: " in line]) == 1, said
    assert not [*tmp_path.glob("*/checkpoint-*"), *tmp_path.glob("*/.checkpoint-*")]


STEPS = 12


def saving(**arguments: Any) -> dict[str, Any]:
    """Arguments of a job that saves every second step, and goes on from what there is."""
    chosen = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
    return {**chosen, "resume_from_checkpoint": "auto", **arguments}


def resilient(network: Network, host: int, folder: Path, **options: Any) -> subprocess.Popen[bytes]:
    """Start a host of two ranks, whose job is restarted after a fault."""
    found = network.hosts[host]
    log = folder / f"{found.name}.log"
    return found.torchrun(2, options.pop("script"), log, max_restarts=3, **options)


def newest(folder: Path) -> int:
    found = (folder / "output").glob("checkpoint-*")
    return max((int(checkpoint.name.rpartition("-")[2]) for checkpoint in found), default=0)


def uninterrupted(folder: Path) -> list[float]:
    """The losses of the same job in one process without a fault."""
    folder.mkdir()
    command = [sys.executable, *job(folder, 1, 1, 1, arguments={"max_steps": STEPS})]
    subprocess.run(command, env=script_environment(), check=True, timeout=PATIENCE_S)
    return losses(folder)


def lose_second_host(network: Network, folder: Path, **options: Any) -> subprocess.Popen[bytes]:
    """Start a job on both hosts, of which the second is gone after a checkpoint."""
    first, second = (resilient(network, host, folder, **options) for host in (0, 1))
    until(lambda: newest(folder) >= 4 or None, "checkpoint", PATIENCE_S, folder / "host-a.log")
    network.hosts[1].kill()
    second.wait()
    return first


def test_a_job_waits_for_a_lost_host_and_goes_on_from_the_newest_checkpoint(
    network: Network, tmp_path: Path
) -> None:
    script = job(tmp_path, 1, 2, 2, arguments=saving(), pause_s=0.3)
    # Without it torch 2.13 gives an agent that comes later no address to meet at.
    options = {"script": script, "nodes": "2", "environment": {OWN_STORE: "1"}}
    first = lose_second_host(network, tmp_path, **options)
    wait_for(tmp_path / "host-a.log", "the job waits for another host: run", PATIENCE_S)
    assert len(losses(tmp_path)) < STEPS
    back = resilient(network, 1, tmp_path, **options)
    assert ends([first, back], tmp_path) == [0, 0], told(tmp_path)
    assert losses(tmp_path) == pytest.approx(uninterrupted(tmp_path / "alone"), rel=1e-5)


def test_a_job_goes_on_without_a_lost_host_if_the_user_allows_it(
    network: Network, tmp_path: Path
) -> None:
    script = job(tmp_path, 2, 1, 2, arguments=saving(), pause_s=0.3, init={"elastic": True})
    first = lose_second_host(network, tmp_path, script=script, nodes="1:2")
    assert ends([first], tmp_path) == [0], told(tmp_path)
    sentence = "2 ranks are there for dp=2 × tp=1 × pp=2: running as dp=1 × tp=1 × pp=2."
    assert sentence in told(tmp_path)
    assert losses(tmp_path) == pytest.approx(uninterrupted(tmp_path / "alone"), rel=1e-5)
    assert not list((tmp_path / "output").glob(".*"))
