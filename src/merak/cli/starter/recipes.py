"""`merak recipes`: the recipes that come with Merak, the text of each, and the schema of all."""

from __future__ import annotations

import json
from dataclasses import dataclass

from merak.cli.options import argument, json_output, option, takes, words
from merak.cli.output import lines_of, show
from merak.cli.recipe.ready import READY, ready_names, ready_text, ready_title


@dataclass(frozen=True, slots=True)
class RecipesReport:
    """Report of recipes.

    Args:
        recipes: what each trains, by its name.
        text: the YAML text of the one that was asked for; None for all.
    """

    recipes: dict[str, str]
    text: str | None


@dataclass(frozen=True, kw_only=True)
class RecipesRequest:
    """Request for the recipes that come with Merak."""

    name: str | None = argument(
        None, "[NAME]", "The recipe to print; without it, all are listed.", **words(READY)
    )
    schema: bool = option(
        False,
        "--schema",
        "",
        "Print the JSON schema of a recipe, by which editors complete fields.",
    )
    as_json: bool = json_output()


@takes(RecipesRequest)
def recipes(request: RecipesRequest) -> None:
    """List the recipes that come with Merak, or print one of them."""
    if request.schema:
        from merak.cli.recipe.json_schema import recipe_schema

        print(json.dumps(recipe_schema(), indent=2))
        return
    names = ready_names() if request.name is None else (request.name,)
    text = None if request.name is None else ready_text(request.name)
    show(RecipesReport({n: ready_title(n) for n in names}, text), _page, request.as_json)


def _page(report: RecipesReport) -> str:
    if report.text is not None:
        return report.text.rstrip("\n")
    copied = "merak init FOLDER --recipe NAME copies it."
    return f"{lines_of(report.recipes)}\n\nmerak recipes NAME prints one,\n{copied}"
