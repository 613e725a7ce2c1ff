from __future__ import annotations

import torch

from merak.data import BatchSignature, signature
from merak.trainer.evaluation import nest, num_samples


def test_outputs_are_nested_by_their_first_name() -> None:
    flat = {"loss": 1, "hidden_states.output0": 2, "hidden_states.output1": 3, "logits": 4}
    assert nest(flat) == {"loss": 1, "hidden_states": (2, 3), "logits": 4}
    assert list(nest(flat)) == ["loss", "hidden_states", "logits"]
    assert nest({}) == {}


def test_samples_of_a_batch() -> None:
    batch = {"x": torch.zeros(3, 5), "scale": torch.zeros(())}
    assert num_samples(signature(batch)) == 3
    assert num_samples(BatchSignature(())) == 0
