"""Commands that take a recipe as `--model`: what they read of it, and what they refuse."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from merak.cli.main import main
from merak.core.errors import PlanError

TINY = {"n_layer": 2, "n_embd": 8, "n_head": 2, "n_positions": 16, "bos_token_id": 0}
RECIPE: dict[str, Any] = {
    "model": {"name": "GPT2LMHeadModel", "config": {**TINY, "eos_token_id": 0}},
    "data": {"source": None, "tokenizer": "train", "vocabulary": 300, "sequence": 8},
    "parallel": {"pp": 2},
    "arguments": {
        "output_dir": "runs/tiny",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
    },
}
PLAN = ["--cluster", "h100:2", "--json"]


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(RECIPE), encoding="utf-8")
    return str(file)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, Any]]]:
    """The workloads and pinned choices that a search is given; it finds nothing."""
    found: list[tuple[Any, Any]] = []

    def note(workload: Any, cluster: Any, pinned: Any, **_: Any) -> Any:
        found.append((workload, pinned))
        raise PlanError("noted")

    monkeypatch.setattr("merak.plan.search.node_order.search_orders", note)
    yield found


def test_memory_is_that_of_the_recipes_layout_and_batch(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.dumps({**RECIPE["model"]["config"], "vocab_size": 300})
    words = ["--pp", "2", "--batch", "2", "--microbatches", "4", "--seq", "8", "--json"]
    assert main(["memory", "--model", "GPT2LMHeadModel", "--config", config, *words]) == 0
    by_hand = json.loads(capsys.readouterr().out)
    assert main(["memory", "--model", recipe, "--json"]) == 0
    captured = capsys.readouterr()
    own = json.loads(captured.out)
    assert own["stages"] == by_hand["stages"] and own["microbatches"] == 4
    assert "no data is read; samples are taken to have 8 tokens, of 300 entries." in captured.err
    assert main(["memory", "--model", recipe, "--pp", "1", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["stages"]) == 1  # the command line's counts


def test_memory_has_the_engine_options_of_the_recipe(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    totals = []
    average = ["arguments.local_steps=4"]
    for changes in (average, [*average, "arguments.outer_optimizer=nesterov"]):
        words = [word for change in changes for word in ("--set", change)]
        dp = ["--set", "parallel.dp=2"]
        assert main(["memory", "--model", recipe, *words, *dp, "--json"]) == 0
        totals.append(json.loads(capsys.readouterr().out)["stages"][0]["total"])
    assert totals[1] > totals[0]  # an anchor and a momentum of every parameter


@pytest.mark.parametrize("name", ["swin", "vit"])
def test_images_have_the_size_of_the_config(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    small = {"swin": {"depths": [1, 1], "num_heads": [1, 2]}, "vit": {"num_hidden_layers": 1}}
    config = {**small[name], "image_size": 32, "patch_size": 4, "window_size": 4}
    if name == "vit":
        del config["window_size"]
    assert main(["memory", "--model", name, "--config", json.dumps(config), "--json"]) == 0
    said = capsys.readouterr().err
    assert f"merak: {name}: no data is read; samples are taken to have the size that" in said
    assert "and 2 classes: --set model.config.num_labels=N for those of your data." in said


def test_a_plan_prices_the_recipes_options_and_keeps_those_of_its_arguments(
    recipe: str, jobs: list[tuple[Any, Any]]
) -> None:
    options = {
        "local_steps": 5, "outer_optimizer": "nesterov", "tied_gradients": "step", "bf16": True,
        "layer_keep": 0.5, "schedule": "interleaved_1f1b", "schedule_options": {"chunks": 2},
        "recompute": "full", "optim": "sgd",
    }  # fmt: skip
    words = [
        word
        for name, value in options.items()
        for word in ("--set", f"arguments.{name}={json.dumps(value)}")
    ]
    assert main(["plan", "--model", recipe, *words, *PLAN]) == 2
    ((workload, pinned),) = jobs
    assert workload.global_batch == 8 and workload.sequence == 8
    common = workload.common
    assert common.local_steps == 5 and common.outer_optimizer == "nesterov"
    assert common.tied_gradients == "step" and str(workload.autocast) == "torch.bfloat16"
    assert workload.source.dropped is not None  # blocks that layer_keep drops
    assert type(workload.optimizer(workload.model.parameters())).__name__ == "SGD"
    assert pinned.schedule == "interleaved_1f1b" and pinned.schedule_options == {"chunks": 2}
    assert pinned.recompute == "full"
    assert (pinned.dp, pinned.tp, pinned.pp, pinned.microbatch) == (None,) * 4


def test_the_command_line_counts_more_than_the_recipe(
    recipe: str, jobs: list[tuple[Any, Any]]
) -> None:
    compressed = ["--set", "arguments.gradient_compression=powersgd"]
    words = ["--gradient-compression", "off", "--zero", "0", "--global-batch", "4", "--seq", "4"]
    zero = ["--set", "arguments.zero=1"]
    assert main(["plan", "--model", recipe, *compressed, *PLAN]) == 2
    assert main(["plan", "--model", recipe, *zero, *words, *PLAN]) == 2
    (first, _), (second, pinned) = jobs
    assert first.common.gradient_compression == "powersgd"
    assert second.common.gradient_compression == "off"
    assert pinned.zero == 0 and (second.global_batch, second.sequence) == (4, 4)


def test_a_recipe_that_plans_itself_keeps_the_degrees_that_it_gives(
    recipe: str, jobs: list[tuple[Any, Any]]
) -> None:
    words = ["--set", "plan=auto", "--set", "arguments.global_batch=16"]
    assert main(["plan", "--model", recipe, *words, *PLAN]) == 2
    ((workload, pinned),) = jobs
    assert (pinned.dp, pinned.pp, pinned.microbatch) == (None, 2, 2)
    assert workload.global_batch == 16


def test_adapters_are_all_that_is_trained(recipe: str, jobs: list[tuple[Any, Any]]) -> None:
    pytest.importorskip("peft")
    lora = "lora={r: 2, target_modules: [c_attn], task_type: CAUSAL_LM, fan_in_fan_out: true}"
    assert main(["plan", "--model", recipe, "--set", lora, *PLAN]) == 2
    ((workload, _),) = jobs
    trained = {n for n, p in workload.model.named_parameters() if p.requires_grad}
    assert trained and all("lora" in name for name in trained)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("arguments.memory_budget=1000", "merak plan cannot price memory_budget=1000 of "),
        ("arguments.gradient_compression=zip", "gradient_compression='zip' is not a choice"),
        ("arguments.layer_keep=2", "layer_keep=2 is no probability to keep blocks"),
        ("data.sequence=1", "data.sequence=1 is too small; use 2 or more."),
    ],
)
def test_what_cannot_be_priced_is_one_sentence(
    change: str, said: str, recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", recipe, "--set", change, *PLAN]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and not captured.out


def test_a_rehearsal_has_the_layout_of_the_recipe(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[Any, Any]] = []

    def note(workload: Any, cluster: Any, candidate: Any, *_: Any, **__: Any) -> Any:
        found.append((workload, candidate))
        raise PlanError("noted")

    monkeypatch.setattr("merak.rehearse.rehearsal.rehearse", note)
    local = ["--set", "parallel.dp=2", "--set", "arguments.local_steps=3"]
    words = ["--cluster", "h100:4", "--rank", "1", "--device", "cpu"]
    assert main(["rehearse", "--model", recipe, *local, *words]) == 2
    ((workload, candidate),) = found
    assert (candidate.dp, candidate.pp, candidate.microbatch) == (2, 2, 2)
    assert candidate.num_microbatches == 4 and workload.common.local_steps == 3


def test_a_plan_without_a_batch_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "GPT2LMHeadModel", "--cluster", "h100:2"]) == 2
    assert "Missing option '--global-batch'" in capsys.readouterr().err
