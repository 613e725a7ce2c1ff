"""What tests cause is counted, in every process of a run, and compared with a budget."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import causes


def test_started_processes_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causes, "FILE", tmp_path / "causes")
    assert causes.counts() == {}
    subprocess.run([sys.executable, "-c", ""], check=True)
    assert causes.counts() == {"processes started": 1}


def test_a_tier_over_its_budget_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causes, "BUDGETS", {"not slow": {"jobs of ranks": 2}})
    assert causes.over_budget("not slow", {"jobs of ranks": 2}) == []
    assert causes.over_budget("slow", {"jobs of ranks": 3}) == []
    (sentence,) = causes.over_budget("not slow", {"jobs of ranks": 3})
    assert sentence.startswith("3 jobs of ranks, where the tests marked `not slow` may have 2")


def test_files_with_most_of_a_cause_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(causes, "FILE", tmp_path / "causes")
    tests = ("tests/a.py::one (call)", "tests/b.py::two[x] (setup)", "tests/b.py::three (call)")
    causes.FILE.write_text("".join(f"models traced\t{test}\n" for test in tests))
    assert causes.largest() == ["models traced: b.py 2, a.py 1"]
