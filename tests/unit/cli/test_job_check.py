"""A recipe that is wrong is refused before any rank is started for it, whatever is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from merak.cli.main import main
from merak.cli.recipe import layout_check
from merak.cli.recipe.recipe import read_recipe
from merak.core import mesh as meshes
from merak.launch import ranks as launch

SMALL = {"n_layer": 2, "n_embd": 8, "n_head": 2, "n_positions": 32}


def write(folder: Path, section: str, changes: dict[str, Any]) -> Path:
    (folder / "texts").mkdir(exist_ok=True)
    (folder / "texts" / "a.txt").write_text("some text", encoding="utf-8")
    recipe: dict[str, dict[str, Any]] = {
        "model": {"name": "GPT2LMHeadModel", "config": SMALL},
        "data": {"source": str(folder / "texts"), "sequence": 16, "held_out": 0},
        "parallel": {"pp": 2},
        "arguments": {"output_dir": str(folder / "run"), "max_steps": 1},
    }
    recipe[section] |= changes
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return file


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(launch, "run_ranks", start)
    meshes.reset()


@pytest.mark.parametrize(
    ("section", "changes", "said"),
    [
        (
            "model",
            {"config": {"n_leyer": 2}},
            "GPT2Config has no field 'n_leyer'; did you mean n",
        ),
        ("model", {"config": {"n_layer": "two"}}, "Field 'n_layer' expected int, got str"),
        ("model", {"config": {**SMALL, "n_head": 3}}, "cannot be built from this config"),
        ("model", {"name": "GPT3LMHeadModel"}, "did you mean GPT2LMHeadModel"),
        ("model", {"name": "BertForSequenceClassification", "config": {}}, "is trained neither to"),
        ("data", {"source": "nowhere"}, "is neither a file nor a folder"),
        ("data", {"files": "*.md"}, "has no files that match data.files='*.md'"),
        ("data", {"files": "/x"}, "data.files='/x' is no pattern of files"),
        ("data", {"tokenizer": "nowhere"}, "data.tokenizer='nowhere' is not a folder"),
        ("data", {"sequence": 33}, "data.sequence=33 is more than the 32 positions"),
        ("arguments", {"max_steps": "three"}, "max_steps='three' should be a whole number."),
        ("arguments", {"per_device_train_batch_size": -1}, "use a whole number of 1 or more."),
        ("arguments", {"max_steps": 0}, "max_steps=0 trains nothing; use 1 or more"),
        ("arguments", {"resume_from_checkpoint": True}, "has no checkpoint-… folder"),
        ("arguments", {"output_dir": "/dev/null/run"}, "cannot be a folder, since /dev/null is a"),
        ("arguments", {"eval_strategy": "steps"}, "has nothing to evaluate with"),
        ("arguments", {"partition": [1, 2, 3]}, "which cannot be laid out over pp=2"),
    ],
)
def test_what_is_wrong_is_said_before_ranks_start(
    section: str,
    changes: dict[str, Any],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", str(write(tmp_path, section, changes)), "--device", "cpu"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (told,) = [line for line in captured.err.splitlines() if line.startswith("merak: ")]
    assert said in told
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "the tokenizer has no chat template, by which conversations become text; set"),
        ({"chat_template": "{{ 1 + }}"}, "cannot be read"),
        ({"chat_template": "refuses.jinja"}, "the chat template refuses a conversation: only nice"),
        ({"chat_template": "chatml"}, None),
    ],
)
def test_conversations_without_a_template(
    changes: dict[str, Any],
    said: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "goodbye"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": messages}), encoding="utf-8")
    template = "{{ raise_exception('only nice words') }}"
    (tmp_path / "refuses.jinja").write_text(template, encoding="utf-8")
    recipe = write(tmp_path, "data", {"source": "chat.jsonl", **changes})
    if said is None:
        with pytest.raises(AssertionError, match="ranks were started"):
            main(["train", str(recipe), "--device", "cpu"])
        return
    assert main(["train", str(recipe), "--device", "cpu"]) == 2
    assert said in capsys.readouterr().err


EXPERTS = {
    "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2,
    "num_key_value_heads": 2, "num_local_experts": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["parallel.pp=7"], "parallel.pp=7: 6 segments cannot fill 7 stages (pp=7); use pp ≤ 6."),
        (
            ["parallel.pp=4", "arguments.schedule=interleaved_1f1b"],
            "6 segments cannot fill 8 stages (pp=4); use pp ≤ 3.",
        ),
        (["parallel.pp=1", "parallel.tp=5"], "parallel.tp=5: tp=5 can split nothing of this model"),
        (
            ["model.name=MixtralForCausalLM", f"model.config={EXPERTS}", "parallel.pp=1",
             "parallel.dp=3", "parallel.ep=3"],
            "parallel.ep=3: ep=3 does not divide the number of experts of model.layers.0.mlp.",
        ),
        (["parallel.pp=1", "parallel.cp=3"], "cp=3 shares out the tokens of each sample, but the"),
        (
            ["parallel.pp=1", "parallel.cp=2", "parallel.tp=2", "arguments.sequence_parallel=true"],
            "sequence_parallel=True shares out tokens over tp=2, and cp=2 already does",
        ),
    ],
)  # fmt: skip
def test_degrees_that_the_model_cannot_have(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write(tmp_path, "arguments", {"gradient_accumulation_steps": 8})
    assert main(["train", str(recipe), *words, "--device", "cpu"]) == 2
    (told,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("merak: ")]
    assert said in told


def test_degrees_that_fit_are_not_laid_out_before_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lay_out(*_: object) -> None:
        raise AssertionError("the model was traced")

    monkeypatch.setattr(layout_check, "forecast_of", lay_out)
    for pp, tp in ((1, 1), (1, 2), (2, 2)):
        recipe = read_recipe(write(tmp_path, "parallel", {"pp": pp, "tp": tp}))
        layout_check.check_layout("recipe.yaml", recipe)
    recipe = read_recipe(write(tmp_path, "parallel", {"pp": 1, "cp": 2}))
    layout_check.check_layout("recipe.yaml", recipe)
    with pytest.raises(AssertionError, match="traced"):
        wide = write(tmp_path, "parallel", {"pp": 2, "tp": 5})
        layout_check.check_layout("recipe.yaml", read_recipe(wide))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--backend", "mpi"], "--backend mpi is not supported; use gloo or nccl."),
        (["--backend", "nccl", "--device", "cpu"], "--backend nccl carries tensors of GPUs alone"),
        (["--device", "tpu"], "--device tpu is not supported; use cpu or cuda."),
    ],
)
def test_options(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for pp in (1, 2):
        assert main(["train", str(write(tmp_path, "parallel", {"pp": pp})), *words]) == 2
        assert said in capsys.readouterr().err


def test_a_field_of_a_config_inside_a_config(capsys: pytest.CaptureFixture[str]) -> None:
    changes = '{"text_config": {"hidden_sise": 8}}'
    assert main(["trace", "--model", "LlavaForConditionalGeneration", "--config", changes]) == 2
    assert "has no field 'hidden_sise'; did you mean hidden_size" in capsys.readouterr().err
