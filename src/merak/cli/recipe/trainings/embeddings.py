"""Training of sentence-transformers' trainer: embeddings of texts that belong together."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import merak
from merak.cli.recipe.data.corpus import Corpus
from merak.cli.recipe.data.records import Source
from merak.cli.recipe.draft import settings
from merak.cli.recipe.schema import EMBEDDING_LOSSES, EmbeddingsRecipe, Recipe
from merak.cli.recipe.trainings.training import Training, TrainingParts
from merak.core.elastic import AUTO_PLAN
from merak.core.errors import CommandError, did_you_mean
from merak.core.mesh import current_mesh
from merak.sentence_transformers import NO_PLAN
from merak.zoo.hub import first_words
from merak.zoo.model_source import ModelSource

LABELS = ("score", "scores", "label", "labels")
"""Columns of labels as sentence-transformers knows them, the first that is there."""

MODULES = "modules.json"
"""File by which a folder is of a SentenceTransformer."""


@dataclass(frozen=True, slots=True)
class _Columns:
    """Columns of the data that a loss reads.

    Args:
        texts: in the order in which the loss takes them.
        label: None for a loss that takes texts alone.
    """

    texts: tuple[str, ...]
    label: str | None

    def of(self, rows: Any) -> Any:
        """Rows with these columns alone, whose label is called as the trainer knows it."""
        if self.label is None:
            return rows.select_columns(list(self.texts))
        chosen = rows.select_columns([*self.texts, self.label])
        return chosen if self.label in LABELS else chosen.rename_column(self.label, LABELS[0])


def _own(recipe: Recipe) -> EmbeddingsRecipe:
    return recipe.embeddings or EmbeddingsRecipe()


# ---- before training ----


def _check(recipe: Recipe, source: ModelSource, found: Source) -> None:
    own, data, folder = _own(recipe), recipe.data, Path(recipe.model.name).expanduser()
    if source.weights is None:
        raise CommandError(
            f"embeddings are learned from the weights of an encoder, and {recipe.model.name} has "
            "none; name the folder of one as model.name."
        )
    if AUTO_PLAN in (recipe.plan, recipe.arguments.get("per_device_train_batch_size")):
        raise CommandError(NO_PLAN)
    if own.pooling is not None and (folder / MODULES).exists():
        raise CommandError(
            f"embeddings.pooling={own.pooling!r} is for an encoder alone, and {folder} is a "
            "SentenceTransformer with a pooling of its own; leave it out."
        )
    if data.sequence % own.pad_to_multiple_of:
        raise CommandError(
            f"data.sequence={data.sequence} is no multiple of embeddings.pad_to_multiple_of="
            f"{own.pad_to_multiple_of}, to which texts are padded; change one of them."
        )
    _check_arguments(own)
    columns = _columns(found.train.columns, recipe)
    row = next(iter(found.train), {})
    for name in columns.texts:
        if not isinstance(row[name], str):
            raise CommandError(
                f"the column {name!r} of {data.name} holds {str(row[name])[:40]!r}, which is no "
                "text; name the columns of texts as embeddings.columns."
            )
    if columns.label is not None and not _is_number(row[columns.label]):
        raise CommandError(
            f"the column {columns.label!r} of {data.name} holds {str(row[columns.label])[:40]!r}, "
            f"and embeddings.loss={own.loss!r} takes {EMBEDDING_LOSSES[own.loss].label}; name the "
            "column of that as data.label_column."
        )


def _check_arguments(own: EmbeddingsRecipe) -> None:
    from sentence_transformers.sentence_transformer import losses

    taken = list(inspect.signature(getattr(losses, own.loss)).parameters)[1:]  # beside the model
    for name in own.loss_arguments:
        if name not in taken:
            meant = did_you_mean(name, taken)
            fix = meant if meant != "." else f"; it has {', '.join(taken)}."
            raise CommandError(
                f"embeddings.loss_arguments.{name} is no argument of {own.loss}{fix}"
            )


def _is_number(value: Any) -> bool:
    try:  # of a CSV file, it is text until the training reads it
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _columns(columns: Sequence[str], recipe: Recipe) -> _Columns:
    """The columns that the loss of a recipe reads, of those that its data has."""
    own, data = _own(recipe), recipe.data
    wanted = EMBEDDING_LOSSES[own.loss]
    label = data.label_column or next((name for name in LABELS if name in columns), None)
    for field, names in (("embeddings.columns", own.columns), ("data.label_column", [label])):
        for name in names or ():
            if name is not None and name not in columns:
                raise CommandError(
                    f"{field} names {name!r}, and {data.name} has the columns "
                    f"{', '.join(columns)}{did_you_mean(name, columns)}"
                )
    texts = tuple(own.columns or (name for name in columns if name != label))
    if wanted.label and label is None:
        raise CommandError(
            f"embeddings.loss={own.loss!r} takes {wanted.label}, and {data.name} has the columns "
            f"{', '.join(columns)}; name the one of it as data.label_column, or set "
            "embeddings.loss=MultipleNegativesRankingLoss for texts alone."
        )
    if label is not None and not wanted.label and own.columns is None:
        others = ", ".join(name for name, reads in EMBEDDING_LOSSES.items() if reads.label)
        raise CommandError(
            f"embeddings.loss={own.loss!r} takes texts alone, and {data.name} has a column "
            f"{label!r}; name the columns of texts as embeddings.columns, or take a loss that "
            f"reads it: {others}."
        )
    most = wanted.most_texts
    if len(texts) < wanted.least_texts or (most is not None and len(texts) > most):
        number = f"{wanted.least_texts}{'' if most else ' or more'}"
        raise CommandError(
            f"embeddings.loss={own.loss!r} takes {number} columns of texts, and {data.name} has "
            f"{', '.join(texts) or 'none'}; name them as embeddings.columns."
        )
    return _Columns(texts, label if wanted.label else None)


# ---- training ----


def _parts(recipe: Recipe, source: ModelSource, found: Source, corpus: Corpus) -> TrainingParts:
    from sentence_transformers.sentence_transformer.data_collator import (
        SentenceTransformerDataCollator,
    )

    import merak.sentence_transformers as ours

    own = _own(recipe)
    model = _model(recipe)
    columns = _columns(corpus.train.column_names, recipe)
    held_out = corpus.held_out
    corpus = replace(
        corpus,
        train=columns.of(corpus.train),
        held_out=None if held_out is None else columns.of(held_out),
        processor=model.processor,
    )
    given = settings(recipe, current_mesh().device)
    given |= {"prompts": own.prompts, "batch_sampler": own.batch_sampler}
    args = ours.SentenceTransformerTrainingArguments(**given)
    padded = {"text": {"pad_to_multiple_of": own.pad_to_multiple_of}}
    collator = SentenceTransformerDataCollator(
        preprocess_fn=partial(model.preprocess, processing_kwargs=padded),
        prompts=own.prompts,
        max_length=recipe.data.sequence,
    )
    return TrainingParts(
        model,
        args,
        corpus,
        collator,
        ours.SentenceTransformerTrainer,
        {"loss": _loss(own, model)},
    )


def _model(recipe: Recipe) -> Any:
    """The model of a folder, without weights yet; an encoder alone gets a pooling."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    own, wanted = recipe.model, _own(recipe).pooling
    with merak.empty_weights():
        model = SentenceTransformer(
            str(Path(own.name).expanduser()),
            device="cpu",
            trust_remote_code=own.trust_remote_code,
            model_kwargs={"dtype": "auto" if own.dtype is None else getattr(torch, own.dtype)},
            config_kwargs=dict(own.config),
        )
        if wanted is not None:
            model[1] = Pooling(model[0].get_embedding_dimension(), wanted)
        if recipe.lora is not None:
            _add_adapters(model, recipe.lora)
        return model


def _add_adapters(model: Any, lora: dict[str, Any]) -> None:
    from peft import LoraConfig

    try:
        model.add_adapter(LoraConfig(**lora))
    except (ValueError, TypeError) as cause:
        raise CommandError(f"lora cannot be added to the model: {first_words(cause)}.") from cause


def _loss(own: EmbeddingsRecipe, model: Any) -> Any:
    from sentence_transformers.sentence_transformer import losses

    try:
        loss = getattr(losses, own.loss)(model, **own.loss_arguments)
        if own.matryoshka_dims is None:
            return loss
        return losses.MatryoshkaLoss(model, loss, own.matryoshka_dims)
    except (TypeError, ValueError) as cause:
        raise CommandError(
            f"embeddings.loss={own.loss!r} cannot be made with embeddings.loss_arguments and "
            f"embeddings.matryoshka_dims as they are: {first_words(cause)}."
        ) from cause


EMBEDDINGS_TRAINING = Training(
    "texts that belong together",
    "sentence-transformers' trainer",
    "sentence_transformers",
    _check,
    _parts,
)
