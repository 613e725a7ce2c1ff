"""`merak doctor` on real ranks: alone, under torchrun, and below the error of a failed start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from merak.cli.main import main
from merak.core.doctor.checks import CHECKS
from merak.core.errors import RunError, StartError
from merak.launch.ranks import Work, run_ranks
from tests.multirank.network import Network, script_environment

TOGETHER = ["ranks", "all-reduce", "clocks", "links"]
PATIENCE_S = 300.0


def names(checks: list[dict[str, str]]) -> list[str]:
    return [*dict.fromkeys(check["name"] for check in checks)]


def test_it_starts_ranks_itself(capfd: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--device", "cpu", "--ranks", "2", "--json"])
    checks = json.loads(capfd.readouterr().out)["checks"]
    assert code == (0 if all(check["ok"] for check in checks) else 1)
    assert names(checks) == [*(check.name for check in CHECKS), *TOGETHER]
    found = {check["name"]: check["found"] for check in checks}
    assert found["ranks"].startswith("2 ranks on 1 host met in ")
    assert found["all-reduce"] == "the sum is right on cpu"
    assert found["links"].endswith("(1 measured)")


def torchrun(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", *words]
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**script_environment(), **environment},
    )


@pytest.mark.slow
def test_it_joins_the_ranks_of_torchrun() -> None:
    words = ["-m", "merak.cli.main", "doctor", "--device", "cpu", "--json"]
    done = torchrun(*words, NCCL_DEBUG="INFO")
    checks = json.loads(done.stdout)["checks"]
    assert names(checks) == [*(check.name for check in CHECKS), *TOGETHER]
    found = {check["name"]: check["found"] for check in checks}
    assert found["rendezvous"].endswith("answers")
    assert "NCCL_DEBUG=INFO: every rank prints what NCCL does" in done.stdout


SCRIPT = "import merak\nmerak.init(dp=2, device='cpu', timeout_s=60)\nprint('started')\n"


@pytest.mark.slow
def test_a_job_that_fails_to_start_advises_below_its_error(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    done = torchrun(str(script), GLOO_SOCKET_IFNAME="eth77")
    assert done.returncode == 1
    assert "started" not in done.stdout
    lines = [line for line in done.stderr.splitlines() if line.startswith("merak")]
    error = next(place for place, line in enumerate(lines) if line.startswith("merak: "))
    advised = next(
        place for place, line in enumerate(lines) if "GLOO_SOCKET_IFNAME=eth77 names an" in line
    )
    assert error < advised
    assert lines[advised].startswith("merak doctor: problem (interfaces): ")
    assert lines[-1] == "merak doctor: run `merak doctor` for all checks."


def fail(steps: int) -> None:
    from merak.core.health.status import end_step

    for _ in range(steps):
        end_step()
    raise RuntimeError("a rank has failed")


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 1])
def test_ranks_fail_to_start_until_one_has_run_a_step(steps: int) -> None:
    with pytest.raises(RunError, match="a rank has failed") as caught:
        run_ranks(Work(fail, (steps,)), 1)
    assert isinstance(caught.value, StartError) == (steps == 0)


@pytest.mark.slow
def test_two_hosts_are_checked_and_compared(network: Network, tmp_path: Path) -> None:
    words = ["-m", "merak.cli.main", "doctor", "--device", "cpu", "--json"]
    logs = [tmp_path / f"{host.name}.log" for host in network.hosts]
    variables: list[dict[str, str]] = [{"NCCL_IB_DISABLE": "1"}, {}]
    running = [
        host.torchrun(2, words, log, environment=own)
        for host, log, own in zip(network.hosts, logs, variables)
    ]
    for process in running:
        process.wait(PATIENCE_S)
    printed = [line for log in logs for line in log.read_text().splitlines() if line[:1] == "{"]
    assert len(printed) == 1, [log.read_text() for log in logs]
    checks = json.loads(printed[0])["checks"]
    assert names(checks) == [*(check.name for check in CHECKS), *TOGETHER, "hosts"]
    assert {check["host"] for check in checks if check["name"] == "host name"} == {
        "host-a",
        "host-b",
    }
    links = [check["found"] for check in checks if check["name"] == "links"]
    assert [found.partition(":")[0] for found in links] == ["inside a host", "between hosts"]
    (clocks,) = (check for check in checks if check["name"] == "clocks")
    assert clocks["found"].startswith("all hosts within ")
    (differing,) = (check for check in checks if check["name"] == "hosts")
    assert differing["found"].startswith("NCCL_IB_DISABLE differs: ")
