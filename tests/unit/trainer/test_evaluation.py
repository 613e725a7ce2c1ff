from __future__ import annotations

import torch

from merak.data import BatchSignature, signature
from merak.trainer.evaluation import num_samples


def test_samples_of_a_batch() -> None:
    batch = {"x": torch.zeros(3, 5), "scale": torch.zeros(())}
    assert num_samples(signature(batch)) == 3
    assert num_samples(BatchSignature(())) == 0
