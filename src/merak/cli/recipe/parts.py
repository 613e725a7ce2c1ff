"""Parts of a recipe's training: model, arguments, data and collator, as a trainer takes them."""

from __future__ import annotations

import logging
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]
import numpy as np
from transformers import (
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerBase,
    default_data_collator,
)

import merak
from merak.cli.recipe.data.corpus import (
    Corpus,
    TokenJob,
    check_conversation,
    prepare,
    stream,
)
from merak.cli.recipe.data.images import (
    ImageColumns,
    image_columns,
    pixel_values,
    processor_of,
    transformed,
)
from merak.cli.recipe.data.isolation import keeps_documents_apart
from merak.cli.recipe.data.losses import mean_over_labels
from merak.cli.recipe.data.mixture import find_data
from merak.cli.recipe.data.objective import Objective, data_format, objective_of
from merak.cli.recipe.data.records import Records, Source
from merak.cli.recipe.data.spans import SpanCorruption
from merak.cli.recipe.data.tokenizer import tokenizer_name
from merak.cli.recipe.draft import settings
from merak.cli.recipe.model import (
    DECODER_START,
    build_model,
    check_positions,
    fit_to_classes,
    fit_to_tokenizer,
)
from merak.cli.recipe.recipe import model_of
from merak.cli.recipe.schema import (
    CHAT,
    COLUMNS,
    FORMATS,
    IMAGES,
    JOINED,
    SEPARATE,
    DataRecipe,
    Recipe,
)
from merak.cli.recipe.trainings.formats import TRAININGS, check_training
from merak.cli.recipe.trainings.training import TrainingParts
from merak.core.announce import announce, announced
from merak.core.errors import CommandError
from merak.core.mesh import current_mesh
from merak.zoo.model_source import ModelSource

logger = logging.getLogger(__name__)


def make_parts(recipe: Recipe) -> TrainingParts:
    """Make all that a trainer needs of a recipe; called on every rank, after `merak.init`.

    Args:
        recipe: as `read_recipe` gives it.

    Raises:
        MerakError: something in the recipe does not fit; the message begins with its place.
    """
    with recipe.origins.located():
        source = model_of(recipe.model)
        args = merak.MerakArguments(**settings(recipe, current_mesh().device))
        with announced(f"reading {recipe.data.name}"):
            found = find_data(recipe.data, args.seed)
            kind = data_format(found, recipe.data, source)
            check_training(recipe, source, found, kind)
            corpus = _corpus(recipe, source, found, kind, args.seed)
        if corpus.summary:
            announce("%s", corpus.summary)
        if kind in TRAININGS:
            return TRAININGS[kind].parts(recipe, source, found, corpus)
        if kind == IMAGES:
            source = fit_to_classes(source, recipe, corpus.classes)
        elif isinstance(corpus.processor, PreTrainedTokenizerBase):
            source = fit_to_tokenizer(source, recipe, corpus.processor)
        collator = _collator(source, recipe.data, kind, corpus)
        if kind == IMAGES:
            args.remove_unused_columns = False  # of which the transform makes those of the model
        is_mean = collator is not None and not _counts_labels(source, kind, recipe.data)
        losses = {"compute_loss_func": mean_over_labels} if is_mean else {}
        return TrainingParts(build_model(source, recipe), args, corpus, collator, losses=losses)


def check_data(recipe: Recipe, source: ModelSource) -> None:
    """Check what a look at the first records of the data can tell.

    Args:
        recipe: whose data it is.
        source: its model.

    Raises:
        CommandError: it does not fit the model, or the recipe.
    """
    data = recipe.data
    found = find_data(data)
    kind = data_format(found, data, source)
    check_training(recipe, source, found, kind)
    _warn_of_unused(recipe, kind)
    if data.streaming:
        _check_streaming(recipe, kind)
    if kind == IMAGES:
        pixel_values(image_columns(found, data), source.config, None, augment=False)
    elif kind != COLUMNS and kind not in TRAININGS:
        objective = objective_of(source, data)
        check_positions(source, data)
        packing_of(recipe, source, objective, kind)
        if kind == CHAT:
            check_conversation(found, data, tokenizer_name(data, recipe.model.name))
    wanted = recipe.arguments.get("eval_strategy", "no")
    if wanted != "no" and not data.held_out and found.held_out is None:
        raise CommandError(
            f"eval_strategy={wanted!r} has nothing to evaluate with, since data.held_out is 0; "
            "hold a share of the data out, or use 'no'."
        )


def _warn_of_unused(recipe: Recipe, kind: str) -> None:
    """Name fields of the data that the recipe gives, and that its format has no use for."""
    given = {keys[1] for keys in recipe.origins.places if keys[0] == "data" and len(keys) > 1}
    parts = {part.name: part.metadata.get("formats", FORMATS) for part in fields(DataRecipe)}
    unused = [f"data.{name}" for name, formats in parts.items() if kind not in formats]
    left = [name for name in unused if name.removeprefix("data.") in given]
    if left:
        logger.warning(
            "of no use for data of the format %s, and not taken: %s.", kind, ", ".join(left)
        )


def _check_streaming(recipe: Recipe, kind: str) -> None:
    steps = recipe.arguments.get("max_steps", -1)
    if not isinstance(steps, int) or steps < 1:
        raise CommandError(
            "data.streaming=true gives data without an end; set arguments.max_steps to the number "
            "of steps to train."
        )
    if recipe.data.max_bytes is not None:
        raise CommandError(
            f"data.max_bytes={recipe.data.max_bytes} limits data that is prepared, but "
            "data.streaming=true reads it while training; leave one of them out."
        )
    if kind == COLUMNS:
        raise CommandError(
            "data.streaming=true is for text, conversations and images; a dataset with the "
            "model's own columns is read from its files as it is: leave it out."
        )


# ---- data ----


def _corpus(recipe: Recipe, source: ModelSource, found: Source, kind: str, seed: int) -> Corpus:
    if kind == COLUMNS or kind in TRAININGS:
        return _as_it_is(found, recipe, seed)
    if kind == IMAGES:
        return _images(found, recipe, source, seed)
    objective = objective_of(source, recipe.data)
    check_positions(source, recipe.data)
    job = TokenJob(
        recipe.data,
        found,
        objective,
        kind,
        packing_of(recipe, source, objective, kind),
        tokenizer_name(recipe.data, recipe.model.name),
        recipe.data_dir,
        seed,
    )
    return stream(job) if recipe.data.streaming else prepare(job)


def packing_of(recipe: Recipe, source: ModelSource, objective: Objective, kind: str) -> str:
    """Return how documents fill samples: as the recipe says, or as the model can do it.

    Args:
        recipe: whose data it is.
        source: its model.
        objective: what it is trained for.
        kind: format of the data.

    Raises:
        CommandError: the model cannot keep documents apart, or not be trained on conversations.
    """
    if kind == CHAT and objective is not Objective.CAUSAL:
        raise CommandError(
            f"{source.name} is trained to {objective.value}, and conversations need a causal "
            "language model; give data.format: text, or another model."
        )
    wanted = recipe.data.packing
    if wanted is not None and wanted != SEPARATE:
        return wanted
    if objective is Objective.CAUSAL and keeps_documents_apart(source, recipe.model):
        return SEPARATE
    if wanted == SEPARATE:
        raise CommandError(
            f"data.packing='separate' cannot be kept by {source.name}, whose tokens attend to "
            "those of other documents whatever their positions are; use joined, or none."
        )
    return JOINED


def _as_it_is(found: Source, recipe: Recipe, seed: int) -> Corpus:
    train, limit = _dataset(found.train, recipe), recipe.data.eval_samples
    if found.held_out is None:
        train, held_out = _split(train, recipe.data, seed)
    else:
        held_out = _dataset(found.held_out, recipe)
    if held_out is not None and limit is not None:
        held_out = held_out.select(range(min(limit, len(held_out))))
    return Corpus(train, held_out)


def _dataset(records: Records, recipe: Recipe) -> Any:
    if records.dataset is not None:
        return records.dataset
    name = records.files[0].name.lower().removesuffix(".gz")
    suffix = name[name.rfind(".") :]
    kind = {".parquet": "parquet", ".csv": "csv", ".tsv": "csv"}.get(suffix, "json")
    further = {"sep": "\t"} if suffix == ".tsv" else {}
    files = [str(file) for file in records.files]
    cache = str(recipe.data_dir / "columns")
    return datasets.load_dataset(kind, data_files=files, split="train", cache_dir=cache, **further)


def _split(rows: Any, data: DataRecipe, seed: int) -> tuple[Any, Any]:
    if data.held_out == 0:
        return rows, None
    if isinstance(rows, datasets.IterableDataset):
        raise CommandError(
            f"data.held_out={data.held_out} of streamed images cannot be told from those to train "
            "on; name the split to evaluate with as data.eval_split, or set data.held_out: 0."
        )
    if len(rows) < 2:
        raise CommandError(
            f"{len(rows)} samples cannot be split into those to train on and data.held_out="
            f"{data.held_out} to evaluate with; give more, or data.held_out: 0."
        )
    order = np.random.default_rng(seed).permutation(len(rows))
    count = max(round(len(rows) * data.held_out), 1)
    # In memory: ranks that write one cache file at once would spoil it.
    held_out, train = (
        rows.select(sorted(map(int, some)), keep_in_memory=True)
        for some in (order[:count], order[count:])
    )
    return train, held_out


def _images(found: Source, recipe: Recipe, source: ModelSource, seed: int) -> Corpus:
    data = recipe.data
    columns = image_columns(found, data)
    folder = source.weights if isinstance(source.weights, Path) else None
    plain = pixel_values(columns, source.config, folder, augment=False)
    if found.held_out is not None:
        train, held_out = found.train.dataset, found.held_out.dataset
    else:
        train, held_out = _split(found.train.dataset, data, seed)
    if data.streaming and data.shuffle_buffer:
        train = train.shuffle(seed=seed, buffer_size=data.shuffle_buffer)
    if held_out is not None and data.eval_samples is not None:
        limit = data.eval_samples
        whole = isinstance(held_out, datasets.Dataset)
        held_out = (
            held_out.select(range(min(limit, len(held_out)))) if whole else held_out.take(limit)
        )
    height, width = plain.size
    return Corpus(
        transformed(train, replace(plain, augment=data.augment)),
        None if held_out is None else transformed(held_out, plain),
        processor_of(plain),
        _image_summary(train, columns, f"{height} × {width}"),
        columns.classes,
    )


def _image_summary(rows: Any, columns: ImageColumns, size: str) -> str:
    count = f"{len(rows):,} images" if isinstance(rows, datasets.Dataset) else "images"
    return f"{count} of {len(columns.classes):,} classes, {size} pixels"


def _collator(source: ModelSource, data: DataRecipe, kind: str, corpus: Corpus) -> Any:
    if kind == COLUMNS:
        return None
    if kind == IMAGES:
        return default_data_collator
    objective = objective_of(source, data)
    tokenizer = corpus.processor
    if objective is Objective.CAUSAL:
        return default_data_collator
    if objective is Objective.SPANS:
        start = getattr(source.config, DECODER_START, None)
        start = tokenizer.pad_token_id if start is None else start
        return SpanCorruption(tokenizer, data.mlm_probability, data.mean_span, start)
    if tokenizer.mask_token is None:
        raise CommandError(
            f"{source.name} fills gaps, but the tokenizer has no mask token; train one with "
            "data.tokenizer: train, or name one that has."
        )
    return DataCollatorForLanguageModeling(tokenizer, mlm_probability=data.mlm_probability)


def _counts_labels(source: ModelSource, kind: str, data: DataRecipe) -> bool:
    """Whether the model's own loss is a mean over the labels of the whole step."""
    return kind != IMAGES and objective_of(source, data) is Objective.CAUSAL
