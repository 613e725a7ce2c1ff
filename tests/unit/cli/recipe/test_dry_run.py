"""`merak train --dry-run`: what would start, and nothing that does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from merak.cli.main import main
from merak.cli.recipe import job
from merak.launch import ranks

RECIPE = Path(__file__).parents[4] / "examples" / "train_recipe.yaml"


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object, **__: object) -> Any:
        raise AssertionError("something has started")

    monkeypatch.setattr(ranks, "run_ranks", start)
    monkeypatch.setattr(job, "run_job", start)
    monkeypatch.setattr(job, "fetch_model", start)


def dry_run(tmp_path: Path, *words: str) -> int:
    folder = f"arguments.output_dir={tmp_path / 'run'}"
    return main(["train", str(RECIPE), folder, "--device", "cpu", "--dry-run", *words])


def test_what_would_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run(tmp_path, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report.pop("parameters") > 0
    assert report == {
        "model": "GPT2LMHeadModel",
        "data": "standard-library",
        "ranks": 4,
        "degrees": {"dp": 1, "tp": 2, "pp": 2, "cp": 1, "ep": 1},
        "device": "cpu",
        "output_dir": str(tmp_path / "run"),
        "checkpoint": None,
    }


def test_what_a_plan_would_choose_is_open(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dry_run(tmp_path, "plan=auto", "parallel={ranks: 4, tp: 2}") == 0
    page = capsys.readouterr().out
    assert "4 ranks on cpu: dp=as planned, tp=2, pp=as planned" in page
    assert "nothing was started" in page


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["parallel.tp=5"], "tp=5 can split nothing"),
        (["arguments.resume_from_checkpoint=nowhere"], "valid checkpoint at nowhere"),
        (["model.config.n_head=3"], "cannot be built from this config"),
    ],
)
def test_what_would_not_start_is_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dry_run(tmp_path, *words) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and said in captured.err


def test_ranks_of_torchrun_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ranks, "under_torchrun", lambda: True)
    assert dry_run(tmp_path) == 2
    assert "--dry-run starts no ranks" in capsys.readouterr().err
