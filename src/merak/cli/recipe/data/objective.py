"""Training objectives of models on a recipe's data, by model class."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import datasets  # type: ignore[import-untyped]
from transformers.models.auto import modeling_auto as auto

from merak.cli.recipe.data import conversations
from merak.cli.recipe.data.records import Source
from merak.cli.recipe.schema import (
    CHAT,
    COLUMNS,
    EMBEDDINGS,
    IMAGES,
    PAIRS,
    TEXT,
    VISION,
    DataRecipe,
)
from merak.core.errors import CommandError
from merak.zoo.model_source import ModelSource

PAIR = ("chosen", "rejected")
"""Columns of pairs of answers, beside which there may be a `prompt`."""


TEXTS_TOGETHER = (("anchor", "positive"), ("sentence1", "sentence2"))
"""Columns by which texts are known to belong together; with `data.format`, they have any names."""


IMAGE_COLUMNS = ("images", "image")
"""Columns of a conversation's images, the first that is there."""


class Objective(Enum):
    """Objective of training on tokens."""

    CAUSAL = "continue text"
    MASKED = "fill masked tokens"
    SPANS = "write removed spans"


def objective_of(source: ModelSource, recipe: DataRecipe) -> Objective:
    """Return what a model is trained for on text.

    Args:
        source: the model.
        recipe: its data.

    Raises:
        CommandError: it is trained on text in neither way.
    """
    # Some models are in two lists; those predict what follows.
    for names, objective in (
        (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, Objective.CAUSAL),
        (auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, Objective.MASKED),
        (auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, Objective.SPANS),
    ):
        if source.name in names.values() and source.model_class.main_input_name == "input_ids":
            return objective
    raise CommandError(
        f"{source.name} is trained neither to continue text nor to fill gaps in it; give a "
        "dataset with the columns that it takes, or use a causal, masked or sequence-to-sequence "
        "language model."
    )


def data_format(found: Source, recipe: DataRecipe, source: ModelSource) -> str:
    """Return the format of data: that of the recipe, or what its columns tell.

    Args:
        found: the data.
        recipe: of the data.
        source: the model, whose own columns are used as they are.

    Raises:
        CommandError: the columns do not fit the format, or tell none.
    """
    columns = found.train.columns
    wanted = recipe.format or _format_by_columns(found, columns, recipe, source)
    if wanted == CHAT:
        for one in found.train.each():
            conversations.check_chat(one.columns, recipe.name)
    elif wanted == TEXT:
        found.train.check_column(recipe.column, recipe.name)
    elif wanted == PAIRS and not set(PAIR) <= set(columns):
        raise CommandError(
            f"{recipe.name} has the columns {', '.join(columns)}, and pairs of answers are "
            "expected in 'chosen' and 'rejected', with a 'prompt' that may be part of both; rename "
            "them, or set data.format."
        )
    elif wanted == VISION and not _is_vision(columns):
        raise CommandError(
            f"{recipe.name} has the columns {', '.join(columns)}, and conversations with images "
            "are expected in 'messages', with 'images' or 'image' beside them; rename them, or set "
            "data.format."
        )
    elif recipe.mix is not None:
        raise CommandError(
            f"data.mix mixes text or conversations, and {recipe.name} has the format {wanted}; "
            "give one dataset as data.source."
        )
    return wanted


def _format_by_columns(
    found: Source, columns: Sequence[str], recipe: DataRecipe, source: ModelSource
) -> str:
    if _is_vision(columns):
        return VISION
    if found.images or _has_images(found.train.dataset):
        return IMAGES
    if source.model_class.main_input_name in columns:
        return COLUMNS
    if set(PAIR) <= set(columns):
        return PAIRS
    if any(set(pair) <= set(columns) for pair in TEXTS_TOGETHER):
        return EMBEDDINGS
    if found.train.text_files or not columns:
        return TEXT
    is_chat, is_text = conversations.is_chat(columns), recipe.column in columns
    if is_chat and is_text:
        raise CommandError(
            f"{recipe.name} has both conversations and a column {recipe.column!r} of text; set "
            "data.format to chat or text."
        )
    if not is_chat and not is_text:
        raise CommandError(
            f"{recipe.name} has the columns {', '.join(columns)}; {source.name} takes "
            f"{source.model_class.main_input_name}, and text is expected in {recipe.column!r}: "
            "set data.column."
        )
    return CHAT if is_chat else TEXT


def _is_vision(columns: Sequence[str]) -> bool:
    return "messages" in columns and any(name in columns for name in IMAGE_COLUMNS)


def _has_images(rows: Any) -> bool:
    features = getattr(rows, "features", None) or {}
    return any(isinstance(kind, datasets.Image) for kind in features.values())
