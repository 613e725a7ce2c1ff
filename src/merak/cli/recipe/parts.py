"""Parts of a recipe's training: model, arguments, data and collator, as a trainer takes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]
import numpy as np
import torch
from transformers import (
    DataCollatorForLanguageModeling,
    PreTrainedModel,
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
from merak.cli.recipe.recipe import model_of
from merak.cli.recipe.schema import (
    CHAT,
    COLUMNS,
    IMAGES,
    JOINED,
    SEPARATE,
    DataRecipe,
    Recipe,
)
from merak.cli.recipe.trl_parts import BY_TRL, check_trl, trl_corpus, trl_training
from merak.core.announce import announce, announced
from merak.core.errors import CommandError
from merak.core.mesh import current_mesh
from merak.zoo.configs.fields import most_positions
from merak.zoo.model_source import ModelSource, resolve_model

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Fields of a config that a fresh model takes from its tokenizer."""


DECODER_START = "decoder_start_token_id"
"""Field of a config that T5's code reads, though its config has none such by itself."""


@dataclass(frozen=True, slots=True)
class TrainingParts:
    """Parts of a training run.

    Args:
        model: without weights yet; with adapters where the recipe has a section `lora`.
        args: the training arguments.
        corpus: the data, and what is saved beside the model.
        data_collator: makes batches of samples; None for the trainer's own.
        compute_loss_func: of transformers' trainer; None for the model's own loss.
        trainer_class: `merak.MerakTrainer`, or one of `merak.trl`.
    """

    model: Any
    args: Any
    corpus: Corpus
    data_collator: Any
    compute_loss_func: Any = None
    trainer_class: type[merak.MerakTrainer] = merak.MerakTrainer

    def make_trainer(self, **further: Any) -> merak.MerakTrainer:
        """Make the trainer.

        Args:
            **further: arguments of it that no recipe has, such as `callbacks`.
        """
        return self.trainer_class(**self.for_trainer(), **further)

    def for_trainer(self) -> dict[str, Any]:
        """Return the keyword arguments of the trainer's class."""
        found = {
            "model": self.model,
            "args": self.args,
            "train_dataset": self.corpus.train,
            "eval_dataset": self.corpus.held_out,
            "processing_class": self.corpus.processor,
            "data_collator": self.data_collator,
        }
        if self.compute_loss_func is not None:
            found["compute_loss_func"] = self.compute_loss_func
        return found


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
            check_trl(recipe, source, kind)
            corpus = _corpus(recipe, source, found, kind, args.seed)
        if corpus.summary:
            announce("%s", corpus.summary)
        if kind == IMAGES:
            source = _fit_to_classes(source, recipe, corpus.classes)
        elif isinstance(corpus.processor, PreTrainedTokenizerBase):
            source = _fit_to_tokenizer(source, recipe, corpus.processor)
        if kind in BY_TRL:
            made = trl_training(recipe, kind, corpus.processor)
            model = _build(source, recipe)
            return TrainingParts(
                model, made.args, corpus, made.data_collator, trainer_class=made.trainer_class
            )
        collator = _collator(source, recipe.data, kind, corpus)
        if kind == IMAGES:
            args.remove_unused_columns = False  # of which the transform makes those of the model
        is_mean = collator is not None and not _counts_labels(source, kind, recipe.data)
        loss = mean_over_labels if is_mean else None
        return TrainingParts(_build(source, recipe), args, corpus, collator, loss)


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
    check_trl(recipe, source, kind)
    if data.streaming:
        _check_streaming(recipe, kind)
    if kind == IMAGES:
        pixel_values(image_columns(found, data), source.config, None, augment=False)
    elif kind in BY_TRL:
        _check_positions(source, data)
    elif kind != COLUMNS:
        objective = objective_of(source, data)
        _check_positions(source, data)
        packing_of(recipe, source, objective, kind)
        if kind == CHAT:
            check_conversation(found, data, tokenizer_name(data, recipe.model.name))
    wanted = recipe.arguments.get("eval_strategy", "no")
    if wanted != "no" and not data.held_out and found.held_out is None:
        raise CommandError(
            f"eval_strategy={wanted!r} has nothing to evaluate with, since data.held_out is 0; "
            "hold a share of the data out, or use 'no'."
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
    if kind == COLUMNS:
        return _as_it_is(found, recipe, seed)
    if kind in BY_TRL:
        corpus = _as_it_is(found, recipe, seed)
        return trl_corpus(corpus, found, recipe, kind)
    if kind == IMAGES:
        return _images(found, recipe, source, seed)
    objective = objective_of(source, recipe.data)
    _check_positions(source, recipe.data)
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
    train, held_out = _dataset(found.train, recipe), found.held_out
    if held_out is not None:
        return Corpus(train, _dataset(held_out, recipe))
    return Corpus(*_split(train, recipe.data, seed))


def _dataset(records: Records, recipe: Recipe) -> Any:
    if records.dataset is not None:
        return records.dataset
    suffix = records.files[0].suffix.lower()
    kind = {".parquet": "parquet", ".csv": "csv", ".tsv": "csv"}.get(suffix, "json")
    files = [str(file) for file in records.files]
    cache = str(recipe.data_dir / "columns")
    return datasets.load_dataset(kind, data_files=files, split="train", cache_dir=cache)


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


# ---- model ----


def _is_stored(recipe: Recipe) -> bool:
    return Path(recipe.model.name).expanduser().exists()


def _fit_to_tokenizer(
    source: ModelSource, recipe: Recipe, tokenizer: PreTrainedTokenizerBase
) -> ModelSource:
    """Fit a new model to the tokenizer's vocabulary; a stored one must be large enough."""
    given = recipe.model.config
    if not _is_stored(recipe):
        ids = {name: getattr(tokenizer, name) for name in TOKEN_IDS if hasattr(source.config, name)}
        if getattr(source.config, "is_encoder_decoder", False):
            ids[DECODER_START] = tokenizer.pad_token_id
        source = resolve_model(
            recipe.model.name,
            {"vocab_size": len(tokenizer), **ids, **given},
            missing_field=(DECODER_START,),
        )
    config = source.config.get_text_config()
    if config.vocab_size < len(tokenizer):
        raise CommandError(
            f"the tokenizer has {len(tokenizer)} entries, but {source.name} has "
            f"vocab_size={config.vocab_size}; leave model.config.vocab_size out, or lower "
            "data.vocabulary."
        )
    return source


def _fit_to_classes(source: ModelSource, recipe: Recipe, classes: tuple[str, ...]) -> ModelSource:
    """Give a model the classes of the data, unless the recipe or its folder names as many."""
    given = recipe.model.config
    if "num_labels" in given or "id2label" in given:
        named = source.config.num_labels or 0
        if named < len(classes):
            raise CommandError(
                f"the data has {len(classes)} classes, but model.config names {named}; leave "
                "num_labels and id2label out."
            )
        return source
    if _is_stored(recipe) and source.config.num_labels == len(classes):
        return source
    names = {
        "id2label": dict(enumerate(classes)),
        "label2id": {n: i for i, n in enumerate(classes)},
    }
    return resolve_model(
        recipe.model.name,
        {**names, **given},
        trust_remote_code=recipe.model.trust_remote_code,
    )


def _check_positions(source: ModelSource, data: DataRecipe) -> None:
    limit = most_positions(source.config)
    if limit is not None and limit[1] < data.sequence:
        raise CommandError(
            f"data.sequence={data.sequence} is more than the {limit[1]} positions of "
            f"{source.name}; shorten it, or set model.config.{limit[0]}."
        )


def _build(source: ModelSource, recipe: Recipe) -> Any:
    given = recipe.model.dtype
    dtype = None if given is None else getattr(torch, given)
    with merak.empty_weights():
        if source.weights is None:
            with _default_dtype(dtype or torch.get_default_dtype()):
                model: Any = source.build()
        else:
            loaded: PreTrainedModel = source.model_class.from_pretrained(
                source.weights, config=source.config, dtype=dtype or "auto"
            )
            model = loaded
        return with_adapters(model, recipe, source)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Parameters that name no type are made in this one, as transformers does for its `dtype`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def with_adapters(model: Any, recipe: Recipe, source: ModelSource) -> Any:
    """Return a model with the adapters of a recipe; as it is where the recipe has none.

    Args:
        model: without weights.
        recipe: that may have a section `lora`.
        source: of the model.

    Raises:
        CommandError: the model has no place for them.
    """
    if recipe.lora is None:
        return model
    from peft import LoraConfig, get_peft_model

    try:
        return get_peft_model(model, LoraConfig(**recipe.lora))
    except (ValueError, TypeError) as cause:
        problem = " ".join(str(cause).split()).rstrip(".")
        raise CommandError(f"lora cannot be added to {source.name}: {problem}.") from cause
