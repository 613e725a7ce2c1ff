"""`merak init` as a user meets it; what it wrote is run on two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from merak.cli.main import main
from merak.cli.recipe.recipe import read_recipe


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if key != "RANK"}
    path = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**kept, **path},
        capture_output=True,
        text=True,
        timeout=300,
    )


def output(folder: Path, *words: str) -> str:
    done = run(folder, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_it_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "model"
    assert main(["init", str(folder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["folder"] == str(folder)
    assert report["files"] == sorted(file.name for file in folder.iterdir())
    assert list(report["commands"]) == [
        "merak train recipe.yaml",
        "torchrun --nproc-per-node 2 train.py",
        "merak plan --model config.json --cluster h100:2 --global-batch 16 --seq 128 "
        "--output plan.json",
        "torchrun --nproc-per-node 2 train.py --plan plan.json",
    ]
    read_recipe(folder / "recipe.yaml")
    assert main(["init", str(folder)]) == 2
    assert f"{folder} exists already; name a new folder." in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "place", "sentence"),
    [
        ("data.seqence=64", "data.seqence=64", "did you mean sequence?"),
        ("data.source=none", "data.source=none", "none"),
        ("model.name=GPT3", "model.name=GPT3", "GPT3"),
    ],
)
def test_a_wrong_word_ends_the_script_with_a_sentence(
    tmp_path: Path, word: str, place: str, sentence: str
) -> None:
    folder = tmp_path / "model"
    assert main(["init", str(folder), "--recipe", "gpt2"]) == 0
    done = run(folder, "train.py", "plan=null", "parallel.pp=1", word)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"merak: {place}: ")
    assert sentence in last and last.count(str(folder / "train.py")) == 1
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_recipe_and_the_script_run(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    assert main(["init", str(folder)]) == 0
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))
    recipe["arguments"]["max_steps"] = 2
    (folder / "short.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    report = json.loads(output(folder, "-m", "merak.cli.main", "train", "short.yaml", "--json"))
    assert report["steps"] == 2
    output(folder, "-m", "torch.distributed.run", "--nproc-per-node=2", "train.py", "--max-steps=2")
    assert (folder / "runs" / "script" / "config.json").exists()
    assert (folder / "runs" / "script" / "model.safetensors").exists()
