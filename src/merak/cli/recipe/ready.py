"""Recipes that come with Merak."""

from __future__ import annotations

from importlib.resources import files

from merak.core.errors import CommandError, did_you_mean

READY = (
    "gpt2",
    "bert",
    "t5",
    "vit",
    "swin",
    "llama",
    "mixtral",
    "sft",
    "lora",
    "dpo",
    "vision",
    "embeddings",
)
"""Names of the recipes."""


def ready_names() -> tuple[str, ...]:
    """Return the names of the recipes, in the order in which they are listed."""
    return READY


def ready_text(name: str) -> str:
    """Return the YAML text of a recipe, with its comments.

    Args:
        name: of the recipe.

    Raises:
        CommandError: there is no such recipe.
    """
    if name not in READY:
        meant = did_you_mean(name, READY)
        fix = meant if meant != "." else f"; use one of {', '.join(READY)}."
        raise CommandError(f"no recipe that comes with Merak is called {name!r}{fix}")
    folder = files("merak.cli.recipe").joinpath("ready_recipes")
    return folder.joinpath(f"{name}.yaml").read_text(encoding="utf-8")


def ready_title(name: str) -> str:
    """Return the first line of a recipe, which says what it trains.

    Args:
        name: of the recipe.
    """
    return ready_text(name).partition("\n")[0].removeprefix("# ")
