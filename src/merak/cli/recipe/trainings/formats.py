"""Formats of data that a package's own trainer learns from, each with its training."""

from __future__ import annotations

from collections.abc import Mapping

from merak.cli.recipe.data.records import Source
from merak.cli.recipe.model import check_positions
from merak.cli.recipe.schema import EMBEDDINGS, FORMATS_OF_SECTIONS, PAIRS, VISION, Recipe
from merak.cli.recipe.trainings.embeddings import EMBEDDINGS_TRAINING
from merak.cli.recipe.trainings.training import Training
from merak.cli.recipe.trainings.trl import PAIRS_TRAINING, VISION_TRAINING
from merak.core.errors import CommandError
from merak.core.packages import refuse_missing
from merak.zoo.model_source import ModelSource

TRAININGS: Mapping[str, Training] = {
    PAIRS: PAIRS_TRAINING,
    VISION: VISION_TRAINING,
    EMBEDDINGS: EMBEDDINGS_TRAINING,
}
"""Trainings by packages' trainers, by the format of their data; others are Merak's own."""


def check_training(recipe: Recipe, source: ModelSource, found: Source, kind: str) -> None:
    """Refuse data for a package's trainer without what it needs, and what is for it alone.

    Args:
        recipe: whose data it is.
        source: its model.
        found: the data.
        kind: its format.

    Raises:
        CommandError: something is missing, or of no use.
    """
    for section, of in FORMATS_OF_SECTIONS.items():
        if of != kind and getattr(recipe, section) is not None:
            raise CommandError(
                f"the section {section} is for {TRAININGS[of].what}, and {recipe.data.name} has "
                f"the format {kind}; leave it out, or set data.format: {of}."
            )
    training = TRAININGS.get(kind)
    if training is None:
        return
    refuse_missing(training.package, f"data.format: {kind}")
    if recipe.data.streaming:
        raise CommandError(
            f"data.streaming=true is for text, conversations and images; {training.what} are "
            "prepared before training: leave it out."
        )
    check_positions(source, recipe.data)
    training.check(recipe, source, found)


def known_training(recipe: Recipe) -> Training | None:
    """The training that a recipe names, by its format or by a section; its data is not read.

    Args:
        recipe: that may lack the source of its data.
    """
    of_sections = (
        kind
        for section, kind in FORMATS_OF_SECTIONS.items()
        if getattr(recipe, section) is not None
    )
    kind = recipe.data.format or next(of_sections, None)
    return None if kind is None else TRAININGS.get(kind)
