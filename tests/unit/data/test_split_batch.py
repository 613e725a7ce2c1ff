"""Batches of a loop of one's own that cannot be trained on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from merak.core.errors import ArgumentsError, DataError
from merak.core.precision import refuse_inference_mode
from merak.data.microbatches import refuse_shared_images, split_batch


def test_batches_without_samples_or_with_gradients_behind_them_are_refused() -> None:
    with pytest.raises(DataError, match="the batch has no samples"):
        split_batch({"x": torch.zeros(0, 3), "y": torch.zeros(0)}, 2)
    leaf = torch.zeros(2, 3, requires_grad=True)
    with pytest.raises(DataError, match=r"column 'x' is computed .*MulBackward0.* detach\(\)"):
        split_batch({"x": leaf * 2}, 2)
    assert len(split_batch({"x": leaf}, 2)) == 2


def test_rows_that_are_no_samples_are_given_as_microbatches() -> None:
    patches = {"input_ids": torch.zeros(4, 6), "pixel_values": torch.zeros(8, 3)}
    with pytest.raises(DataError, match=r"'pixel_values' has 8 rows and 'input_ids' has 4.*list"):
        split_batch(patches, 2)
    assert split_batch(patches, 1)[0]["pixel_values"].shape == (8, 3)
    cut = [{n: t[start:end] for n, t in patches.items()} for start, end in ((0, 1), (1, 4))]
    assert [len(one["input_ids"]) for one in split_batch(cut, 2)] == [1, 3]
    with pytest.raises(DataError, match=r"a list of 2 microbatches, and .* laid out for 3"):
        split_batch(cut, 3)


def test_images_of_which_a_sample_has_none_are_given_as_microbatches() -> None:
    config = SimpleNamespace(image_token_id=7)
    ids = torch.tensor([[7, 7, 7, 7, 1], [7, 7, 1, 1, 1], [1, 1, 1, 1, 1]])
    batch = {"input_ids": ids, "pixel_values": torch.zeros(3, 3, 8, 8)}
    with pytest.raises(DataError, match=r"3 images for 3 samples, and sample 2 has no .*a list"):
        refuse_shared_images(batch, config)
    refuse_shared_images({**batch, "input_ids": ids[[0, 1, 1]]}, config)
    for other in (SimpleNamespace(), None):
        refuse_shared_images(batch, other)
    refuse_shared_images({"input_ids": ids}, config)


def test_training_within_inference_mode_is_refused() -> None:
    refuse_inference_mode()
    with torch.no_grad():
        refuse_inference_mode()
    with torch.inference_mode(), pytest.raises(ArgumentsError, match="nothing would be trained"):
        refuse_inference_mode()
