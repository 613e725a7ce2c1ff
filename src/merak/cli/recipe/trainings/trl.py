"""Trainings of TRL's trainers: pairs of answers, conversations with images."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from merak.cli.recipe.data.corpus import Corpus
from merak.cli.recipe.data.objective import Objective, objective_of
from merak.cli.recipe.data.records import Source
from merak.cli.recipe.data.tokenizer import load_tokenizer, with_template
from merak.cli.recipe.data.vision import (
    PaddedConversations,
    load_processor,
    marks_answers,
    with_images,
)
from merak.cli.recipe.draft import settings
from merak.cli.recipe.model import build_model, fit_to_tokenizer
from merak.cli.recipe.schema import PreferenceRecipe, Recipe
from merak.cli.recipe.trainings.training import Training, TrainingParts
from merak.core.errors import CommandError
from merak.core.mesh import current_mesh
from merak.zoo.model_source import ModelSource

# ---- pairs of answers ----


def _check_pairs(recipe: Recipe, source: ModelSource, found: Source) -> None:
    if source.weights is None or objective_of(source, recipe.data) is not Objective.CAUSAL:
        raise CommandError(
            "pairs of answers compare a causal language model with what it was; name the "
            "folder of one as model.name."
        )


def _parts_of_pairs(
    recipe: Recipe, source: ModelSource, found: Source, corpus: Corpus
) -> TrainingParts:
    import merak.trl

    tokenizer = load_tokenizer(_processor_name(recipe))
    _complete(tokenizer, recipe)
    given = _settings(recipe) | dataclasses.asdict(recipe.preference or PreferenceRecipe())
    model = build_model(fit_to_tokenizer(source, recipe, tokenizer), recipe)
    corpus = replace(corpus, processor=tokenizer)
    args = merak.trl.DPOConfig(**given)
    return TrainingParts(model, args, corpus, None, merak.trl.DPOTrainer)


PAIRS_TRAINING = Training("pairs of answers", "TRL's trainer", "trl", _check_pairs, _parts_of_pairs)


# ---- conversations with images ----


def _check_vision(recipe: Recipe, source: ModelSource, found: Source) -> None:
    known = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()
    if source.weights is None or source.name not in known:
        raise CommandError(
            f"conversations with images need a model that reads both, with its processor, and "
            f"{source.name} is none from a folder; name the folder of one as model.name."
        )
    processor: Any = load_processor(_processor_name(recipe))
    with_template(processor, recipe.data)
    if not recipe.data.prompt_loss and not marks_answers(processor):
        raise CommandError(
            "data.prompt_loss=false counts answers alone in the loss, and the chat template does "
            "not mark them ({% generation %} … {% endgeneration %}); name one that does as "
            "data.chat_template, or set data.prompt_loss: true."
        )


def _parts_of_vision(
    recipe: Recipe, source: ModelSource, found: Source, corpus: Corpus
) -> TrainingParts:
    import merak.trl

    processor: Any = load_processor(_processor_name(recipe))
    _complete(processor, recipe)
    files, held_out = found.train.files, corpus.held_out
    corpus = replace(
        corpus,
        train=with_images(corpus.train, files),
        held_out=None if held_out is None else with_images(held_out, files),
        processor=processor,
    )
    answers_only = not recipe.data.prompt_loss
    given = _settings(recipe) | {"assistant_only_loss": answers_only}
    args = merak.trl.SFTConfig(**given)
    collator = PaddedConversations.of(processor, recipe.data.sequence, answers_only)
    model = build_model(source, recipe)
    return TrainingParts(model, args, corpus, collator, merak.trl.SFTTrainer)


VISION_TRAINING = Training(
    "conversations with images", "TRL's trainer", "trl", _check_vision, _parts_of_vision
)


# ---- both ----


def _processor_name(recipe: Recipe) -> str:
    """Folder or name of the tokenizer or processor, which is not trained here."""
    return recipe.data.tokenizer or recipe.model.name


def _complete(processor: Any, recipe: Recipe) -> None:
    """Give a tokenizer or processor the recipe's chat template, and a token for padding."""
    with_template(processor, recipe.data)
    tokenizer = getattr(processor, "tokenizer", processor)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token


def _settings(recipe: Recipe) -> dict[str, Any]:
    own = settings(recipe, current_mesh().device)
    return {**own, "max_length": recipe.data.sequence}
