"""`merak export` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from merak.checkpoint.model_files import plan_model_files
from merak.checkpoint.saver import Contents, save_state
from merak.checkpoint.state import RankState
from merak.cli.main import main
from merak.core.mesh import Mesh
from merak.graph.weights.holders import find_holders
from tests.unit.checkpoint.models import gpt2

ALONE = Mesh(1, 1, 1, 0, torch.device("cpu"), None)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = gpt2()
    names = [name for name, _ in model.named_parameters()]
    files = plan_model_files(model, find_holders(model, names, {}, ALONE), ALONE)
    folder = tmp_path_factory.mktemp("runs") / "checkpoint-3"
    save_state(folder, RankState(model, None, names, {}, ALONE), Contents(model_files=files))
    return folder


def test_json_lists_what_was_written(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["export", str(checkpoint), str(out), "--max-shard-size", "0.06MB", "--json"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert set(report) == {"folder", "files", "parameters", "bytes", "seconds"}
    assert report["folder"] == str(out)
    assert report["files"] == sorted(path.name for path in out.iterdir())
    assert report["bytes"] == sum(path.stat().st_size for path in out.iterdir())
    model = AutoModelForCausalLM.from_pretrained(out)
    assert report["parameters"] == model.num_parameters()


def test_a_page_for_people(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["export", str(checkpoint), str(tmp_path / "out"), "--dtype", "bfloat16"]
    assert main(words) == 0
    parameters = sum(parameter.numel() for parameter in gpt2().parameters())
    assert f"out: 3 files, {parameters:,} parameters, 2" in capsys.readouterr().out
    assert main(words) == 2
    assert "is not empty; name another folder, or replace" in capsys.readouterr().err
    assert main([*words, "--overwrite"]) == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--max-shard-size", "many"], "--max-shard-size many is no size of a file; use such as"),
        (["--max-shard-size", "0GB"], "--max-shard-size 0GB is no size of a file"),
        (
            ["--dtype", "int8"],
            "--dtype int8 is no type of parameters; use one of float32, bfloat16, float16.",
        ),
    ],
)
def test_options_that_make_no_sense(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    assert main(["export", str(tmp_path), str(tmp_path / "out"), *words]) == 2
    assert sentence in capsys.readouterr().err


def test_a_folder_that_is_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path), str(tmp_path.with_name("out"))]) == 2
    error = capsys.readouterr().err
    assert f"merak: {tmp_path} is no checkpoint of Merak (manifest.json" in error
    assert error.count("\n") == 1
