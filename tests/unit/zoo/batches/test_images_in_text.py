"""Texts with images in between: in which form a model takes them, and with how many tokens."""

from __future__ import annotations

import pytest
import torch
from transformers import LlavaConfig, LlavaForConditionalGeneration, Qwen2_5_VLConfig
from transformers import Qwen2_5_VLForConditionalGeneration as QwenVL

from merak.core.errors import MerakError
from merak.zoo.batches.columns import Column, Run, draw_batch
from merak.zoo.batches.examples import image_examples
from merak.zoo.batches.images_in_text import MIN_TEXT, image_tokens, with_image_tokens

MISMATCH = "Image features and image tokens do not match, tokens: {}, features: {}"


def test_a_run_stands_in_every_row_and_its_number_nowhere_else() -> None:
    column = Column((1, 12), 8, run=Run(7, 3), without=(7, 6)).of(50)
    drawn = draw_batch({"ids": column}, seed=1)["ids"]
    assert (drawn[:, 1:4] == 7).all() and set(drawn.flatten().tolist()) == {*range(6), 7}
    assert (drawn == 7).sum() == 150


def test_rows_of_a_sample_and_fixed_values() -> None:
    columns = {"patches": Column((4, 5), per_sample=4), "grid": Column((1, 3), values=(1, 2, 2))}
    drawn = draw_batch({name: column.of(3) for name, column in columns.items()}, seed=1)
    assert drawn["patches"].shape == (12, 5) and drawn["patches"].is_floating_point()
    assert drawn["grid"].tolist() == [[1, 2, 2]] * 3


def test_images_as_pixels() -> None:
    config = LlavaConfig()
    first = next(image_examples(LlavaForConditionalGeneration, config, 8)).columns
    assert first["pixel_values"].shape == (1, 3, 336, 336)
    assert first["input_ids"].run == Run(config.image_token_id, 1)


def test_images_as_patches_of_all_samples() -> None:
    first = next(image_examples(QwenVL, Qwen2_5_VLConfig(), 8)).columns
    assert first["pixel_values"].of(2).shape == (32, 3 * 2 * 14 * 14)
    assert first["image_grid_thw"].of(2).shape == (2, 3)
    assert first["mm_token_type_ids"].run == Run(1, 1)


def test_the_model_says_how_many_tokens_an_image_has() -> None:
    failures: list[MerakError] = []
    found = image_examples(LlavaForConditionalGeneration, LlavaConfig(), 8, failures)
    config, first = LlavaConfig(), next(found).columns
    failures.append(MerakError(MISMATCH.format(2, 8)))  # of a batch of two samples
    assert next(found).columns["input_ids"].run == Run(config.image_token_id, 4)

    assert image_tokens(ValueError("no such thing"), first, config) is None
    numbers = with_image_tokens(first, config.text_config.hidden_size * 5)
    equal = MISMATCH.format(*[2 * config.text_config.hidden_size * 5] * 2)
    assert image_tokens(ValueError(equal), numbers, config) == 5  # it counts the numbers


@pytest.mark.parametrize("times", [3, 100])
def test_texts_have_room_for_an_image(times: int) -> None:
    first = next(image_examples(QwenVL, Qwen2_5_VLConfig(), 32)).columns
    longer = with_image_tokens(first, times)
    length = max(32, times + MIN_TEXT)
    assert {longer[n].shape for n in ("input_ids", "labels", "mm_token_type_ids")} == {(1, length)}
    drawn = draw_batch(longer, seed=0)
    is_image = drawn["input_ids"] == Qwen2_5_VLConfig().image_token_id
    assert torch.equal(is_image, drawn["mm_token_type_ids"] == 1) and is_image.sum() == times
