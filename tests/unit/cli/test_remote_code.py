"""Code in a model's folder runs only with the user's word, whichever command is to run it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from merak.cli.main import main
from tests.remote_code import write_remote_model

RECIPE = "model: {{name: {folder}}}\narguments: {{output_dir: {folder}/out}}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    model = tmp_path / "model"
    model.mkdir()
    write_remote_model(model)
    return model


@pytest.mark.parametrize("command", ["trace", "memory", "check", "train"])
def test_code_that_is_not_trusted(
    folder: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", str(folder)]
    if command == "train":
        recipe = folder / "recipe.yaml"
        recipe.write_text(RECIPE.format(folder=folder), encoding="utf-8")
        words = [str(recipe)]
    assert main([command, *words]) == 2
    said = capsys.readouterr().err
    assert "code in its own folder (auto_map)" in said
    assert "add --trust-remote-code (in a recipe, trust_remote_code: true under model)" in said


@pytest.mark.parametrize("command", ["trace", "memory"])
def test_code_that_is_trusted(
    folder: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--model", str(folder), "--trust-remote-code", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "OddModel"
