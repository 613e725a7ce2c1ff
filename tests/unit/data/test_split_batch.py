"""Batches of a loop of one's own that cannot be trained on."""

from __future__ import annotations

import pytest
import torch

from merak.core.errors import ArgumentsError, DataError
from merak.core.precision import refuse_inference_mode
from merak.parallel import split_batch


def test_batches_without_samples_or_with_gradients_behind_them_are_refused() -> None:
    with pytest.raises(DataError, match="the batch has no samples"):
        split_batch({"x": torch.zeros(0, 3), "y": torch.zeros(0)}, 2)
    leaf = torch.zeros(2, 3, requires_grad=True)
    with pytest.raises(DataError, match=r"column 'x' is computed .*MulBackward0.* detach\(\)"):
        split_batch({"x": leaf * 2}, 2)
    assert len(split_batch({"x": leaf}, 2)) == 2


def test_training_within_inference_mode_is_refused() -> None:
    refuse_inference_mode()
    with torch.no_grad():
        refuse_inference_mode()
    with torch.inference_mode(), pytest.raises(ArgumentsError, match="nothing would be trained"):
        refuse_inference_mode()
