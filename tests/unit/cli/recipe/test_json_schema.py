"""The JSON schema of recipes, beside what reading them refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import yaml

from merak.cli.main import main
from merak.cli.recipe.draft import draft_of
from merak.cli.recipe.json_schema import recipe_schema
from merak.cli.recipe.ready import ready_names, ready_text
from merak.cli.recipe.recipe import parse_recipe
from merak.core.errors import MerakError

ROOT = Path(__file__).parents[4]
EXAMPLE = (ROOT / "examples" / "train_recipe.yaml").read_text(encoding="utf-8")


def problems(recipe: object) -> list[tuple[Any, ...]]:
    """The places of a recipe that an editor would mark."""
    schema = recipe_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return [tuple(own.path) for own in jsonschema.Draft202012Validator(schema).iter_errors(recipe)]


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == recipe_schema()


@pytest.mark.parametrize("name", ready_names())
def test_of_recipes_that_come_with_merak_empty_fields_alone_are_marked(name: str) -> None:
    recipe = yaml.safe_load(ready_text(name))
    places = [(section, field) for section, field in (("model", "name"), ("data", "source"))
              if field in recipe[section] and recipe[section][field] is None]  # fmt: skip
    assert problems(recipe) == places


@pytest.mark.parametrize(
    ("field", "value", "is_right"),
    [
        ("model.name", 3, False),
        ("model.dtype", "bf16", True),
        ("model.names", "GPT2LMHeadModel", False),
        ("data.packing", "separate", True),
        ("data.packing", None, True),
        ("data.packing", "together", False),
        ("data.sequence", 1, False),
        ("data.held_out", 0.6, False),
        ("parallel.tp", "two", False),
        ("parallel.dp", None, True),
        ("arguments.bf16", "auto", True),
        ("arguments.bf16", "maybe", False),
        ("arguments.recompute", 0.5, True),
        ("arguments.recompute", ["selective"], True),
        ("arguments.zero", 4, False),
        ("arguments.optim", "adamw_torch", True),
        ("arguments.optim", "adamw_torc", False),
        ("arguments.eval_strategy", "steps", True),
        ("arguments.max_steps", 2.5, False),
        ("arguments.max_stepz", 2, False),
        ("arguments.memory_budget", "80GB", True),
        ("arguments.output_dir", None, False),
        ("lora.r", 8, True),
        ("lora.r", "eight", False),
        ("lora.rank", 8, False),
        ("plan", "auto", True),
        ("plan", 3, False),
        ("modle", {}, False),
    ],
)
def test_fields_are_marked_that_reading_refuses(field: str, value: object, is_right: bool) -> None:
    recipe = yaml.safe_load(EXAMPLE)
    section, _, name = field.partition(".")
    if name:
        recipe.setdefault(section, {})[name] = value
    else:
        recipe[section] = value
    assert (problems(recipe) == []) is is_right
    if is_right:
        return
    with pytest.raises(MerakError):
        draft_of(parse_recipe(recipe), torch.device("cpu"), 4)


def test_a_recipe_needs_a_model_and_a_folder_for_results() -> None:
    recipe = yaml.safe_load(EXAMPLE)
    del recipe["arguments"]["output_dir"], recipe["model"]
    assert sorted(problems(recipe)) == [(), ("arguments",)]
