"""Models of recipes: fitted to their data, and built without weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import merak
from merak.cli.recipe.schema import DataRecipe, Recipe
from merak.core.errors import CommandError
from merak.zoo.configs.fields import most_positions
from merak.zoo.model_source import ModelSource, resolve_model

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Fields of a config that a fresh model takes from its tokenizer."""


DECODER_START = "decoder_start_token_id"
"""Field of a config that T5's code reads, though its config has none such by itself."""


def _is_stored(recipe: Recipe) -> bool:
    return Path(recipe.model.name).expanduser().exists()


def fit_to_tokenizer(
    source: ModelSource, recipe: Recipe, tokenizer: PreTrainedTokenizerBase
) -> ModelSource:
    """Fit a new model to the tokenizer's vocabulary; a stored one must be large enough.

    Args:
        source: the model.
        recipe: of its name and config.
        tokenizer: of its data.

    Raises:
        CommandError: the model has fewer entries than the tokenizer.
    """
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


def fit_to_classes(source: ModelSource, recipe: Recipe, classes: tuple[str, ...]) -> ModelSource:
    """Give a model the classes of the data, unless the recipe or its folder names as many.

    Args:
        source: the model.
        recipe: of its name and config.
        classes: names of the classes.

    Raises:
        CommandError: the recipe names fewer.
    """
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


def check_positions(source: ModelSource, data: DataRecipe) -> None:
    """Refuse samples that are longer than the positions of a model.

    Args:
        source: the model.
        data: section of its data.

    Raises:
        CommandError: they are.
    """
    limit = most_positions(source.config)
    if limit is not None and limit[1] < data.sequence:
        raise CommandError(
            f"data.sequence={data.sequence} is more than the {limit[1]} positions of "
            f"{source.name}; shorten it, or set model.config.{limit[0]}."
        )


def build_model(source: ModelSource, recipe: Recipe) -> Any:
    """Build a model without weights, with the adapters of its recipe.

    Args:
        source: of the model.
        recipe: that says its type, and whether it has adapters.

    Raises:
        CommandError: the model has no place for adapters.
    """
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
