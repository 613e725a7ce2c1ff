"""Places of a recipe's fields, and changes of them on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from merak.cli.main import main
from merak.cli.recipe.recipe import read_recipe
from merak.core.errors import CommandError, DataError, TrainingError

RECIPE = """\
model:
  name: GPT2LMHeadModel
  config: {n_layer: 4}
data:
  sequence: 64
parallel: {tp: 2, pp: 2}
arguments:
  output_dir: runs/small
  max_steps: 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("old", "new", "place", "said"),
    [
        ("data:", "dta:", "4:1", "the recipe has no section 'dta'; did you mean data?"),
        ("sequence:", "seqence:", "5:3", "data has no field 'seqence'; did you mean sequence"),
        ("64", "many", "5:3", "data.sequence='many' should be a whole number."),
        ("pp: 2", "pp: 0", "6:19", "parallel.pp=0 is not a degree"),
        ("max_steps", "max_step", "9:3", "arguments has no field 'max_step'; did you mean max_"),
        ("  name: GPT2LMHeadModel", "  name:", "2:3", "model.name has no value; write one"),
        ("sequence: 64", "learning_rate: 1", "5:3", "it is a field of arguments: arguments.learn"),
        ("sequence: 64", "packing: seperate", "5:3", "is not known; did you mean separate"),
        ("  max_steps: 3", "  output_dir: x", "9:3", "output_dir is given twice, first at "),
    ],
)
def test_a_wrong_field_is_shown_where_it_is(
    old: str, new: str, place: str, said: str, file: Path
) -> None:
    file.write_text(RECIPE.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(CommandError) as caught:
        read_recipe(file)
    assert str(caught.value).startswith(f"{file}:{place}: ")
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_changes_on_the_command_line(file: Path) -> None:
    words = ["arguments.learning_rate=1e-4", "parallel.tp=1", "model.config.n_head=2"]
    recipe = read_recipe(file, [*words, "data.held_out=0", "lora={r: 4}", "plan=auto"])
    assert recipe.arguments["learning_rate"] == 1e-4
    assert (recipe.parallel.tp, recipe.parallel.pp) == (1, 2)
    assert recipe.model.config == {"n_layer": 4, "n_head": 2}
    assert (recipe.data.held_out, recipe.lora, recipe.plan) == (0, {"r": 4}, "auto")
    assert read_recipe(file, ["parallel=null"]).parallel.num_ranks == 1


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("max_steps", "'max_steps' changes no field of the recipe; write FIELD=VALUE"),
        ("max_steps=3", "max_steps=3: the recipe has no section 'max_steps'; it is a field of arg"),
        ("data.sequence=x", "data.sequence=x: data.sequence='x' should be a whole number"),
        ("data.sequence.a=x", "data.sequence.a=x sets a field of data.sequence, which has no"),
        ("lora.rank=3", "lora has no field 'rank'"),
        ("lora.r=three", "lora.r=three: lora.r='three' should be a whole number"),
        ("data.files=[", "data.files=[ is not YAML"),
    ],
)
def test_wrong_changes(word: str, said: str, file: Path) -> None:
    with pytest.raises(CommandError) as caught:
        read_recipe(file, [word])
    assert said in str(caught.value)


def test_errors_that_name_a_field_get_its_place(file: Path) -> None:
    origins = read_recipe(file).origins
    for message, line in (
        ("max_steps=3 is too few", 9),
        ("GPT2Config has no field 'n_layer'", 3),
        ("what fits data.sequence is not tp=2", 5),
    ):
        with pytest.raises(DataError, match=f"recipe.yaml:{line}:.*{message}"), origins.located():
            raise DataError(message)
    with pytest.raises(TrainingError, match=r"^max_steps=3"), origins.located():
        raise TrainingError("max_steps=3 was not reached")
    with pytest.raises(DataError, match=r"^the data of the model"), origins.located():
        raise DataError("the data of the model is empty")


def test_values_are_shown_where_they_are(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(RECIPE.replace("max_steps: 3", "max_steps: three"), encoding="utf-8")
    assert main(["train", str(file), "parallel=null", "--device", "cpu"]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("merak: ")]
    assert said == [f"merak: {file}:9:3: max_steps='three' should be a whole number."]
