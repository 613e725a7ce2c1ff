"""Recipes: what is read, and what wrong ones are told."""

import re
from pathlib import Path

import pytest
import yaml

from merak.cli.recipe.recipe import parse_recipe, read_recipe
from merak.cli.recipe.schema import DataRecipe, Degrees, ModelRecipe
from merak.core.errors import CommandError

RECIPE = """
model:
  name: GPT2LMHeadModel
  config: {n_layer: 4}
data:
  source: standard-library
  sequence: 64
  held_out: 0
parallel: {tp: 2, pp: 2}
arguments:
  output_dir: runs/small
  max_steps: 3
"""


def test_reads_a_recipe(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE, encoding="utf-8")
    recipe = read_recipe(file)
    assert recipe.model == ModelRecipe("GPT2LMHeadModel", {"n_layer": 4})
    assert recipe.data == DataRecipe(sequence=64, held_out=0)
    assert recipe.parallel == Degrees(None, 2, 2)
    assert recipe.parallel.num_ranks == 4
    assert not recipe.parallel.elastic
    assert recipe.arguments == {"output_dir": "runs/small", "max_steps": 3}
    assert recipe.output_dir == Path("runs/small")


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ([1], "the recipe should hold named fields, not"),
        ({"modle": {}}, "no section 'modle'; did you mean model?"),
        ({"model": {"config": {}}}, "model.name is missing from the recipe"),
        ({"model": "GPT2"}, "model should hold named fields, not 'GPT2'"),
        ({"model": {"name": 3}}, "model.name=3 should be a text"),
        ({"data": {"seqence": 3}}, "data has no field 'seqence'; did you mean sequence"),
        ({"data": {"sequence": "long"}}, "data.sequence='long' should be a whole number"),
        ({"data": {"max_bytes": "all"}}, "data.max_bytes='all' should be a whole number or null"),
        ({"data": {"sequence": True}}, "data.sequence=True should be a whole number"),
        ({"data": {"sequence": 1}}, "data.sequence=1 is too small; use 2 or more"),
        ({"data": {"vocabulary": 10}}, "data.vocabulary=10 is too small"),
        ({"data": {"vocabulary": 10**9}}, "data.vocabulary=1000000000 is too large; use 2000000"),
        ({"data": {"held_out": 0.9}}, "data.held_out=0.9 is too large; use 0.5 or less"),
        ({"parallel": {"pp": 0}}, "parallel.pp=0 is not a degree"),
        ({"arguments": {"output_dir": "x", "max_step": 3}}, "no field 'max_step'; did you mean m"),
        ({"arguments": {"max_steps": 3}}, "arguments.output_dir is missing"),
    ],
)
def test_wrong_recipes(sections: object, said: str) -> None:
    whole: object = sections
    if isinstance(sections, dict):
        whole = {"model": {"name": "M"}, "arguments": {"output_dir": "x"}, **sections}
    with pytest.raises(CommandError) as caught:
        parse_recipe(whole)
    assert said in str(caught.value)


def test_files_that_are_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="cannot be read: No such file"):
        read_recipe(tmp_path / "nowhere.yaml")
    file = tmp_path / "recipe.yaml"
    file.write_text("a: [1", encoding="utf-8")
    with pytest.raises(
        CommandError, match=r"recipe.yaml:1:6: this is not YAML: .* began at line 1, column 4"
    ):
        read_recipe(file)


def test_numbers_and_words_are_as_in_json(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    written = "learning_rate: 1e-4, weight_decay: .5, recompute: off, sub_pipelining: on, "
    written += "bf16: true"
    file.write_text(
        f"model: {{name: M}}\narguments: {{output_dir: x, {written}, max_steps: 12, seed: 0x1F}}\n",
        encoding="utf-8",
    )
    assert read_recipe(file).arguments == {
        "output_dir": "x", "learning_rate": 1e-4, "weight_decay": 0.5, "recompute": "off",
        "sub_pipelining": "on", "bf16": True, "max_steps": 12, "seed": 31,
    }  # fmt: skip


ROOT = Path(__file__).parents[4]


def test_recipe_of_the_documentation() -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    (written,) = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    assert parse_recipe(yaml.safe_load(written)).parallel.num_ranks == 4


def test_example_recipe() -> None:
    recipe = read_recipe(ROOT / "examples" / "train_recipe.yaml")
    assert recipe.model.name == "GPT2LMHeadModel"
