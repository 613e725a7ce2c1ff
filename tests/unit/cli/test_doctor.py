"""`merak doctor` as a user meets it, with findings that are given."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence

import pytest

from merak.cli.main import main
from merak.core.doctor.finding import Finding, Level
from merak.core.errors import RunError, StartError
from merak.core.health import failure
from merak.launch.doctor import examine

FINE = Finding("python", Level.OK, "Python 3.11")
SLOW = Finding("variables", Level.WARNING, "NCCL_DEBUG=INFO", "unset it", "host-a")
WRONG = Finding("torch", Level.PROBLEM, "a CPU build", "install torch for CUDA")

Given = Callable[[Sequence[Finding], Sequence[Finding] | Exception], None]


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Given:
    """Sets what the host and the ranks give."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)

    def set_findings(host: Sequence[Finding], ranks: Sequence[Finding] | Exception) -> None:
        def run(*_: object) -> Sequence[Finding]:
            if isinstance(ranks, Exception):
                raise ranks
            return ranks

        monkeypatch.setattr(examine, "host_findings", lambda system: list(host))
        monkeypatch.setattr(examine, "run_ranks", run)
        monkeypatch.setattr(examine, "examine_ranks", run)

    return set_findings


@pytest.mark.parametrize(
    ("host", "code", "last"),
    [
        ([FINE], 0, "Nothing is wrong."),
        ([FINE, SLOW], 0, "1 warning; what to do stands below each."),
        ([WRONG, SLOW, FINE], 1, "1 problem and 1 warning; what to do stands below each."),
    ],
)
def test_the_page_ends_with_what_is_wrong(
    host: list[Finding],
    code: int,
    last: str,
    given: Given,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given(host, [Finding("ranks", Level.OK, "2 ranks met")])
    assert main(["doctor", "--device", "cpu"]) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == last
    assert lines[0] == f"ok       python{' ' * (max(len(f.name) for f in host) - 6)}  Python 3.11"
    if code:
        assert lines[2:-2] == [
            "warning  variables  host-a: NCCL_DEBUG=INFO",
            "                    → unset it",
            "problem  torch      a CPU build",
            "                    → install torch for CUDA",
        ]


def test_json_is_the_contract(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    given([FINE, SLOW], [WRONG])
    assert main(["doctor", "--device", "cpu", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["checks"][1:] == [
        {"name": "variables", "ok": True, "level": "warning", "found": "NCCL_DEBUG=INFO",
         "fix": "unset it", "host": "host-a"},
        {"name": "torch", "ok": False, "level": "problem", "found": "a CPU build",
         "fix": "install torch for CUDA", "host": ""},
    ]  # fmt: skip


def test_ranks_that_fail_are_a_problem(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    failed = (
        "rank 1 failed:\nTraceback (most recent call last):\n  File …\nRuntimeError: no socket."
    )
    given([FINE], StartError(failed))
    assert main(["doctor", "--device", "cpu", "--json"]) == 1
    (_, ranks) = json.loads(capsys.readouterr().out)["checks"]
    assert (ranks["name"], ranks["ok"]) == ("ranks", False)
    assert ranks["found"] == "rank 1 failed: RuntimeError: no socket"
    assert ranks["fix"].startswith("look first at the other problems")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--ranks", "0"], "--ranks 0 is no number of ranks; use 1 or more."),
        (["--timeout", "0"], "--timeout 0 is no time to wait"),
        (["--timeout", "nan"], "--timeout nan is no time to wait"),
        (["--backend", "mpi"], "--backend mpi is not supported"),
        (["--device", "tpu"], "--device tpu is not supported"),
    ],
)
def test_bad_input_is_refused(
    words: list[str], sentence: str, given: Given, capsys: pytest.CaptureFixture[str]
) -> None:
    given([FINE], [])
    assert main(["doctor", "--device", "cpu", *words]) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert captured.out == ""


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch, given: Given) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "host-a", "MASTER_PORT": "29500"}
    for name, value in {**place, "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("rank")
def test_ranks_of_a_job_that_cannot_meet_show_their_own_host(
    given: Given, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given([FINE], RuntimeError("connection refused"))
    assert main(["doctor", "--device", "cpu", "--json"]) == 1
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [(own["name"], own["found"]) for own in checks] == [
        ("python", "Python 3.11"),
        ("ranks", "connection refused"),
    ]
    monkeypatch.setenv("LOCAL_RANK", "1")  # another rank of the host has shown it
    assert main(["doctor", "--device", "cpu", "--json"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("rank")
def test_ranks_that_wait_in_vain_show_their_own_host(
    given: Given, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wait(*_: object) -> None:
        print("not the result")
        failure.advise()  # as the watchdog does before it ends the process
        sys.exit(1)

    given([FINE], [])
    monkeypatch.setattr(examine, "examine_ranks", wait)
    with pytest.raises(SystemExit):
        main(["doctor", "--device", "cpu", "--json", "--timeout", "7"])
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert checks[-1]["found"] == "ranks have not come within 7 s"


@pytest.mark.usefixtures("rank")
def test_the_number_of_ranks_is_torchruns(given: Given) -> None:
    given([FINE], [])
    with pytest.raises(ValueError, match="torchrun has started the ranks already"):
        main(["doctor", "--device", "cpu", "--ranks", "2"])


def test_variables_of_another_job_are_dropped_before_ranks_start(
    given: Given, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given([FINE], [WRONG])
    monkeypatch.setenv("RANK", "3")  # alone: no rank of a job
    assert main(["doctor", "--device", "cpu"]) == 1
    assert "RANK" not in examine.os.environ


@pytest.mark.parametrize(("error", "advised"), [(StartError("lost"), 1), (RunError("lost"), 0)])
def test_a_command_whose_ranks_fail_to_start_advises(
    error: RunError,
    advised: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(**_: object) -> None:
        raise error

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("merak.cli.main.app", fails)
    assert main(["train", "recipe.yaml"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "merak: lost"
    assert sum("run `merak doctor` for all checks" in line for line in lines) == advised
