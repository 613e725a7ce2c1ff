"""Texts with images in between, for models that put an image's features in place of tokens.

A model says by its forward's arguments in which form it takes images, and by its config which
token stands for a feature. How many features an image has it says itself: where their number is
not that of the tokens, its own check fails with both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from transformers import PreTrainedConfig

from merak.zoo.batches.columns import Column, Columns, Run
from merak.zoo.configs import field_names as names
from merak.zoo.configs.fields import inner_configs, is_count, text_part

GRID = 4
"""Patches along an image's side, where a sample has as many rows of pixels as patches."""

TILES = (1, 2, 3, 5)
"""Into how many tiles an image may be cut, with the whole image as one of them."""

MIN_TEXT = 8
"""Tokens of text beside those of an image."""

_MISMATCH = re.compile(r"image tokens do not match.*?tokens: (\d+).*?features:? (\d+)", re.I)


def with_images(
    config: PreTrainedConfig, text: Columns, taken: Mapping[str, Any]
) -> Iterator[Columns]:
    """Yield batches of one sample with an image each, in the forms in which models take them.

    Args:
        config: the model's config.
        text: columns of a text alone, and an image's pixels if the forward takes them.
        taken: the arguments of the model's forward.
    """
    columns = _with_tokens(config, text, taken)
    if "image_grid_thw" in taken:
        grid = Column((1, 3), values=(1, GRID, GRID))
        for size in _patch_sizes(config):
            patches = Column((GRID**2, size), per_sample=GRID**2)
            yield columns | {"pixel_values": patches, "image_grid_thw": grid}
    elif image := text.get("pixel_values"):
        sides = {"image_sizes": Column((1, 2), values=image.shape[-2:])}
        known = ({}, sides) if sides.keys() <= taken.keys() else ({},)
        for tiles, further in product(((), *((number,) for number in TILES)), known):
            pixels = replace(image, shape=(1, *tiles, *image.shape[1:]))
            yield columns | {"pixel_values": pixels} | further


def _with_tokens(config: PreTrainedConfig, text: Columns, taken: Mapping[str, Any]) -> Columns:
    """Put a token of the image into a text, with what says of each token what it is."""
    token, ids = _image_token(config), text.get("input_ids")
    if token is None or ids is None:
        return text
    special = tuple(sorted(_special_tokens(config)))
    kinds = [name for name in taken if name.endswith("token_type_ids")]
    return {
        **text,
        "input_ids": replace(ids, run=Run(token, 1), without=special),
        **{name: Column(ids.shape, 1, run=Run(1, 1)) for name in kinds},
    }


def image_tokens(error: BaseException, columns: Columns, config: PreTrainedConfig) -> int | None:
    """Return how many tokens a sample's image has, from the error of a batch with others.

    Args:
        error: what the model failed with.
        columns: what the batch held, of one sample.
        config: the model's.

    Returns:
        None, if it did not fail for that.
    """
    found, ids = _MISMATCH.search(str(error)), columns.get("input_ids")
    if found is None or ids is None or ids.run is None:
        return None
    tokens, features = map(int, found.groups())
    if tokens == features:  # a model that counts the numbers of all features
        features //= getattr(text_part(config), "hidden_size", None) or 1
    times, rest = divmod(ids.run.times * features, max(1, tokens))
    return None if rest or times in (0, ids.run.times) else times


def with_image_tokens(columns: Columns, times: int) -> Columns:
    """Make the text columns of a batch with a number of tokens for a sample's image.

    Args:
        columns: of one sample, with one such token.
        times: their number; a text that has no room for them and a few others is longer.
    """
    ids = columns["input_ids"]
    length = max(ids.shape[-1], times + MIN_TEXT)
    texts = {n: c for n, c in columns.items() if c.shape == ids.shape and c.num_values is not None}
    return columns | {
        name: replace(
            column,
            shape=(*column.shape[:-1], length),
            run=column.run and replace(column.run, times=times),
        )
        for name, column in texts.items()
    }


def _image_token(config: PreTrainedConfig) -> int | None:
    """Return the token in whose places a model puts the features of an image."""
    found = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
    return found if is_count(found) else None


def _special_tokens(config: PreTrainedConfig) -> Iterator[int]:
    """Yield the tokens that a config names, such as those around an image."""
    for owner in (config, *(inner for _, inner in inner_configs(config))):
        for name, value in vars(owner).items():
            if names.TOKEN.search(name) and is_count(value):
                yield value


def _patch_sizes(config: PreTrainedConfig) -> Iterator[int]:
    """Yield how many numbers a patch of an image may have, the likeliest first."""
    owner = getattr(config, "vision_config", config)
    side = getattr(owner, "patch_size", None)
    if not is_count(side):
        return
    channels = next((c for n in names.IMAGE_CHANNELS if is_count(c := getattr(owner, n, None))), 3)
    moments = getattr(owner, "temporal_patch_size", None)
    found = [n for n in (moments, 1, 2) if is_count(n)]
    yield from dict.fromkeys(channels * n * side**2 for n in found)
