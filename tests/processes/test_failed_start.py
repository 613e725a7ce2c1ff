"""Advice below the error of a job that has failed to start."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from merak.core.doctor import failed_start
from merak.core.doctor.failed_start import advice, advise
from merak.core.doctor.finding import Check, Finding, Judgement, Level, System, fine, problem
from merak.core.health import failure

SOURCE = Path(__file__).parents[2] / "src"


def test_problems_come_first_and_what_is_fine_is_left_out() -> None:
    found = [
        Finding("python", Level.OK, "Python 3.11"),
        Finding("variables", Level.WARNING, "slow", "unset it"),
        Finding("interfaces", Level.PROBLEM, "no eth7", "use eth0"),
    ]
    assert advice(found).splitlines() == [
        "merak doctor: problem (interfaces): no eth7. To do: use eth0.",
        "merak doctor: warning (variables): slow. To do: unset it.",
        "merak doctor: run `merak doctor` for all checks.",
    ]
    assert advice(found[:1]) == (
        "merak doctor: quick checks of this host find nothing wrong; run `merak doctor` for all "
        "checks."
    )


def test_a_check_that_hangs_delays_nobody(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    released = threading.Event()

    def wrong(fact: None) -> Iterator[Judgement]:
        yield problem("it is wrong", "mend it")

    def hangs(system: System) -> None:
        released.wait()

    def refused(fact: None) -> Iterator[Judgement]:
        raise AssertionError("takes long, so it does not run here")

    def nothing(system: System) -> None:
        return None

    checks = (
        Check("slow", nothing, refused, at_failed_start=False),
        Check("quick", nothing, wrong),
        Check("hanging", hangs, lambda fact: iter([fine("late")])),
    )
    monkeypatch.setattr(failed_start, "CHECKS", checks)
    start = time.monotonic()
    advise(limit_s=0.2)
    assert time.monotonic() - start < 60
    released.set()
    assert capsys.readouterr().err.splitlines() == [
        "merak doctor: problem (quick): it is wrong. To do: mend it.",
        "merak doctor: run `merak doctor` for all checks.",
    ]


def run(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(f"from merak.core.health import failure\nfailure.install()\n{code}\n")
    return subprocess.run(
        [sys.executable, str(script)],
        env={"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=600,
    )


STARTING = """
with failure.starting(lambda: print("advice", file=__import__("sys").stderr)):
    {inside}
raise ValueError("outside")
"""


@pytest.mark.parametrize(
    ("inside", "last"),
    [
        ("raise ValueError('inside')", ["ValueError: inside", "advice"]),
        ("pass", ["ValueError: outside"]),
    ],
)
def test_advice_stands_below_the_error_of_a_start_alone(
    inside: str, last: list[str], tmp_path: Path
) -> None:
    lines = run(tmp_path, STARTING.format(inside=inside)).stderr.splitlines()
    assert lines[-len(last) :] == last
    assert lines.count("advice") == last.count("advice")


def test_the_outer_start_advises() -> None:
    advised: list[str] = []
    with pytest.raises(KeyError), failure.starting(lambda: advised.append("outer")):
        with failure.starting(lambda: advised.append("inner")):
            pass
        raise KeyError
    failure.advise()
    failure.advise()
    assert advised == ["outer"]
    with failure.starting(lambda: advised.append("next")):  # after a start that has failed
        pass
    failure.advise()
    assert advised == ["outer"]
