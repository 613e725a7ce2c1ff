"""Recipes that come with Merak, and the page about all fields."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from merak.cli.main import main
from merak.cli.recipe.draft import settings
from merak.cli.recipe.page import BEGIN, render
from merak.cli.recipe.planned_job import planned_job
from merak.cli.recipe.ready import ready_names, ready_text, ready_title
from merak.cli.recipe.recipe import model_of, read_recipe
from merak.core.errors import CommandError
from merak.zoo import check_by_name
from merak.zoo.request import Request

ROOT = Path(__file__).parents[4]
BY_PACKAGES = ("dpo", "vision", "embeddings")
NEEDS_MODEL = ("sft", "lora", *BY_PACKAGES)
NEEDS_DATA = ("vit", "swin", *NEEDS_MODEL)


def test_every_recipe_has_a_file() -> None:
    folder = ROOT / "src" / "merak" / "cli" / "recipe" / "ready_recipes"
    assert sorted(ready_names()) == sorted(file.stem for file in folder.glob("*.yaml"))


@pytest.mark.parametrize("name", ready_names())
def test_recipes_are_right(name: str) -> None:
    words = ["model.name=GPT2LMHeadModel"] if name in NEEDS_MODEL else []
    words += ["data.source=somewhere"] if name in NEEDS_DATA else []
    recipe = read_recipe(name, words)
    model_of(recipe.model)
    assert recipe.output_dir == Path("runs") / name
    assert (recipe.lora is not None) == (name == "lora")
    assert f"merak train {name} " in ready_text(name) or f"merak train {name}\n" in ready_text(name)


@pytest.mark.parametrize("name", ready_names())
def test_recipes_train_in_bfloat16_on_gpus(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["model.name=GPT2LMHeadModel"] if name in NEEDS_MODEL else []
    words += ["data.source=somewhere"] if name in NEEDS_DATA else []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device, on in (("cuda", True), ("cpu", False)):
        assert settings(read_recipe(name, words), torch.device(device))["bf16"] is on
    in_fp16 = read_recipe(name, [*words, "arguments.fp16=true"])
    assert settings(in_fp16, torch.device("cuda"))["bf16"] is False
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    assert settings(read_recipe(name, words), torch.device("cuda"))["bf16"] is False


def test_the_model_of_a_recipe(tmp_path: Path) -> None:
    job = planned_job("recipe:gpt2")
    assert job is not None and job.model.name == "GPT2LMHeadModel"
    assert job.model.config["vocab_size"] == 50257 and job.model.config["n_layer"] == 12
    assert planned_job("GPT2LMHeadModel") is None and planned_job(str(tmp_path)) is None
    with pytest.raises(CommandError, match="cannot be read"):
        planned_job(str(tmp_path / "nowhere.yaml"))
    with pytest.raises(CommandError, match="--set a=1 changes a field of a recipe, but --model B"):
        planned_job("B", ["a=1"])


@pytest.mark.parametrize("name", [name for name in NEEDS_DATA if name not in BY_PACKAGES])
def test_a_recipe_that_lacks_data_has_a_model(name: str) -> None:
    words = ["model.name=GPT2LMHeadModel"] if name in NEEDS_MODEL else []
    job = planned_job(f"recipe:{name}", words)
    assert job is not None and model_of(job.recipe.model).name == job.model.name
    assert ("vocab_size" in job.model.config) == (name in NEEDS_MODEL)  # images have none


def test_a_recipe_that_leaves_its_model_open_says_how_to_name_it() -> None:
    with pytest.raises(CommandError, match=r"sft: the recipe leaves its model to you; add --s"):
        planned_job("recipe:sft")


def test_a_check_makes_the_model_of_a_recipe_small(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[Request] = []

    def note(request: Request, *others: object) -> None:
        requests.append(request)
        raise CommandError("noted")

    monkeypatch.setattr(check_by_name, "check_named", note)
    assert main(["check", "--model", "recipe:gpt2", "--config", '{"n_head": 6}', "--pp", "2"]) == 2
    (request,) = requests
    config = request.source({}).config
    assert (request.model, config.n_layer, config.n_head) == ("GPT2LMHeadModel", 12, 6)
    small = request.source({"n_layer": 2, "n_head": 2}).config
    assert (small.n_layer, small.n_head) == (2, 6)  # the command line's stays, the recipe's not


@pytest.mark.parametrize("name", [name for name in NEEDS_DATA if name not in BY_PACKAGES])
def test_what_must_be_filled_in_is_said(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", name]) == 2
    said = capsys.readouterr().err
    assert f"merak: {name}:" in said and "has no value; write one there, or give " in said


def test_the_page_has_every_field() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    made = page[page.index(BEGIN) :]
    assert made == render(), "run python -m merak.cli.recipe.page docs/recipes.md"


def test_recipes_are_listed_and_copied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "999")
    assert main(["recipes"]) == 0
    listed = capsys.readouterr().out
    assert all(f"{ready_title(name)}\n" in listed for name in ready_names())
    assert main(["recipes", "llama"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["model"]["name"] == "LlamaForCausalLM"
    assert main(["init", str(tmp_path / "new"), "--recipe", "llama"]) == 0
    assert (tmp_path / "new" / "recipe.yaml").read_text("utf-8") == ready_text("llama")
    script = (tmp_path / "new" / "train.py").read_text("utf-8")
    compile(script, "train.py", "exec")
    assert "\ntorchrun --nproc-per-node gpu train.py [FIELD=VALUE ...]\n" in script
    said = capsys.readouterr().out
    assert "\nmerak plan --model recipe.yaml --cluster h100:8 " in said
    assert "\ntorchrun --nproc-per-node gpu train.py " in said
    assert "one rank for every GPU of this machine." in said and "must be given" not in said
    assert main(["init", str(tmp_path / "tuned"), "--recipe", "sft"]) == 0
    said = capsys.readouterr().out
    assert "\nmerak check --model recipe.yaml --set model.name=… --pp 2\n" in said
    assert "\nmerak train recipe.yaml model.name=… data.source=…\n" in said
    # As many ranks as the recipe's degrees need: torchrun's 2 would be refused.
    assert "\ntorchrun --nproc-per-node 1 train.py model.name=… data.source=…\n" in said
    script = (tmp_path / "tuned" / "train.py").read_text("utf-8")
    assert "\ntorchrun --nproc-per-node 1 train.py [FIELD=VALUE ...]\n" in script
    assert "The recipe's degrees make 1 rank: raise them in its section parallel" in said
    assert "model.name and data.source must be given: in these commands, or once in" in said
    for words in (["recipes", "lama"], ["init", str(tmp_path / "other"), "--recipe", "lama"]):
        assert main(words) == 2
        assert "is called 'lama'; did you mean llama?" in capsys.readouterr().err
    assert main(["train", "lama"]) == 2
    assert "No such file or directory; did you mean llama?" in capsys.readouterr().err
