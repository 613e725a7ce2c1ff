"""Parts of the trainings that TRL's trainers do: pairs of answers, conversations with images."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

import merak
from merak.cli.recipe.data.corpus import Corpus
from merak.cli.recipe.data.objective import Objective, objective_of
from merak.cli.recipe.data.records import Source
from merak.cli.recipe.data.tokenizer import load_tokenizer, tokenizer_name, with_template
from merak.cli.recipe.data.vision import (
    PaddedConversations,
    load_processor,
    marks_answers,
    with_images,
)
from merak.cli.recipe.draft import settings
from merak.cli.recipe.schema import PAIRS, VISION, PreferenceRecipe, Recipe
from merak.core.errors import CommandError
from merak.core.mesh import current_mesh
from merak.core.packages import refuse_missing
from merak.zoo.model_source import ModelSource

BY_TRL = (PAIRS, VISION)
"""Formats of data whose samples and loss TRL's trainers make."""


@dataclass(frozen=True, slots=True)
class TrlTraining:
    """What a trainer of TRL's takes beside the model and its data.

    Args:
        args: its arguments, which are Merak's as well.
        trainer_class: of `merak.trl`.
        data_collator: None for the trainer's own.
    """

    args: Any
    trainer_class: type[merak.MerakTrainer]
    data_collator: Any = None


def check_trl(recipe: Recipe, source: ModelSource, kind: str) -> None:
    """Refuse data for TRL's trainers without what they need, and what is for them alone.

    Args:
        recipe: whose data it is.
        source: its model.
        kind: format of the data.

    Raises:
        CommandError: something is missing, or of no use.
    """
    if kind != PAIRS and recipe.preference is not None:
        raise CommandError(
            f"the section preference is for pairs of answers, and {recipe.data.name} has the "
            f"format {kind}; leave it out, or set data.format: pairs."
        )
    if kind not in BY_TRL:
        return
    refuse_missing("trl", f"data.format: {kind}")
    if recipe.data.streaming:
        raise CommandError(
            "data.streaming=true is for text, conversations and images; pairs of answers and "
            "conversations with images are prepared before training: leave it out."
        )
    if kind == PAIRS:
        if source.weights is None or objective_of(source, recipe.data) is not Objective.CAUSAL:
            raise CommandError(
                "pairs of answers compare a causal language model with what it was; name the "
                "folder of one as model.name."
            )
        return
    known = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()
    if source.weights is None or source.name not in known:
        raise CommandError(
            f"conversations with images need a model that reads both, with its processor, and "
            f"{source.name} is none from a folder; name the folder of one as model.name."
        )
    processor = _processor(recipe, kind)
    if not recipe.data.prompt_loss and not marks_answers(processor):
        raise CommandError(
            "data.prompt_loss=false counts answers alone in the loss, and the chat template does "
            "not mark them ({% generation %} … {% endgeneration %}); name one that does as "
            "data.chat_template, or set data.prompt_loss: true."
        )


def trl_corpus(corpus: Corpus, found: Source, recipe: Recipe, kind: str) -> Corpus:
    """The data as a trainer of TRL's takes it, with its tokenizer or processor.

    Args:
        corpus: rows of the data.
        found: where they are from.
        recipe: whose data it is.
        kind: format of the data.
    """
    processor = _processor(recipe, kind)
    tokenizer = getattr(processor, "tokenizer", processor)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if kind == VISION:
        rows = [
            None if one is None else with_images(one, found.train.files)
            for one in (corpus.train, corpus.held_out)
        ]
        corpus = replace(corpus, train=rows[0], held_out=rows[1])
    return replace(corpus, processor=processor)


def _processor(recipe: Recipe, kind: str) -> Any:
    """The tokenizer or processor of a recipe, with its chat template."""
    name = tokenizer_name(recipe.data, recipe.model.name)
    found: Any = load_tokenizer(name) if kind == PAIRS else load_processor(name)
    with_template(found, recipe.data)
    return found


def trl_training(recipe: Recipe, kind: str, processor: Any) -> TrlTraining:
    """What a trainer of TRL's takes for a recipe.

    Args:
        recipe: of the job.
        kind: format of its data.
        processor: its tokenizer or processor.
    """
    import merak.trl

    given = settings(recipe, current_mesh().device)
    data = recipe.data
    given["max_length"] = data.sequence
    if kind == PAIRS:
        given |= dataclasses.asdict(recipe.preference or PreferenceRecipe())
        return TrlTraining(merak.trl.DPOConfig(**given), merak.trl.DPOTrainer)
    given["assistant_only_loss"] = not data.prompt_loss
    collator = PaddedConversations.of(processor, data.sequence, not data.prompt_loss)
    return TrlTraining(merak.trl.SFTConfig(**given), merak.trl.SFTTrainer, collator)
