"""Recipes for pairs of answers: what they need, and what is refused before ranks are started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from merak.cli.main import main
from tests.multirank.test_recipes import write_model, write_pairs


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    write_model(tmp_path / "model")
    write_pairs(tmp_path / "pairs.jsonl")
    return [
        f"model.name={tmp_path / 'model'}", f"data.source={tmp_path / 'pairs.jsonl'}",
        "data.sequence=64", f"arguments.output_dir={tmp_path / 'out'}",
    ]  # fmt: skip


def test_a_dry_run_says_what_would_start(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("trl")
    command = ["train", "dpo", *words, "parallel.pp=2", "--dry-run", "--json", "--device", "cpu"]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["model"], found["ranks"]) == ("LlamaForCausalLM", 2)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            ["data.streaming=true", "arguments.max_steps=2"],
            "pairs of answers are prepared before training",
        ),
        (["model.name=LlamaForCausalLM"], "compare a causal language model with what it was"),
        (["data.format=text"], "data.column='text' is no column of"),
        (["data.format=columns"], "the section preference is for pairs of answers"),
        (["preference.loss_type=sigmoit"], "preference.loss_type='sigmoit'"),
        (["preference.beta=-1"], "preference.beta=-1"),
    ],
)
def test_what_does_not_fit_is_refused(
    words: list[str], changes: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("trl")
    assert main(["train", "dpo", *words, *changes, "--dry-run", "--device", "cpu"]) == 2
    assert sentence in capsys.readouterr().err


def test_columns_of_other_names(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pairs.jsonl").write_text('{"good": "yes", "bad": "no"}\n' * 20, "utf-8")
    assert main(["train", "dpo", *words, "--dry-run", "--device", "cpu"]) == 2
    assert "expected in 'chosen' and 'rejected'" in capsys.readouterr().err


def test_commands_before_a_job_know_no_pairs(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    changes = [part for word in words for part in ("--set", word)]
    assert main(["memory", "--model", "recipe:dpo", *changes]) == 2
    assert "of which TRL's trainer makes samples and loss" in capsys.readouterr().err
