"""Recipe of a script of one's own, as `merak init --recipe` writes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from merak.cli.recipe.recipe import read_recipe
from merak.cli.recipe.schema import Recipe
from merak.core.health import failure


def recipe_of_script(file: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """Read the recipe of a script; an error about it then ends the script with one sentence.

    That holds for all that follows in the script. The sentence begins with the line and column of
    the field, as those of `merak train` do, and only the first rank that fails prints it.

    Args:
        file: the recipe.
        overrides: changes of its fields, such as `arguments.learning_rate=1e-4`.

    Raises:
        CommandError: as of `read_recipe`.
    """
    failure.install()
    recipe = read_recipe(file, overrides)
    failure.locate_errors(recipe.origins.locate)
    return recipe
