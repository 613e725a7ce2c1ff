"""What is trained on one device: models of known sizes, as large as a training fits it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers.pytorch_utils import Conv1D

from merak.plan import PRESETS
from tools.models import Size, build_model

FULL = {
    "GPT-2 1.5B": ("gpt2", Size(1600, 48, 25, 50257, 1024, 4, 4)),
    "Llama 1B": ("llama", Size(2048, 22, 32, 32000, 1024, 4, 4)),
    "Llama 8B": ("llama", Size(4096, 4, 32, 128256, 8192, 1, 2)),
}
TINY = Size(32, 2, 2, 64, 16, 2, 2)

STATE_BYTES = 16
"""Of a parameter in mixed precision: itself, its gradient and AdamW's two, in float32 each."""

SHARE_TO_FILL = 0.8
ACTIVATION_BYTES = {"gpt2": 110, "llama": 110}
"""Upper estimates, for a token and a layer, by what the hidden size is multiplied with."""

LOGIT_BYTES = 20
"""Likewise for a token and a word of the vocabulary."""


@dataclass(frozen=True, slots=True)
class Case:
    """What a pair of processes trains.

    Args:
        architecture: as of `build_model`.
        size: sizes of the model and its batch.
        device: "cuda" or "cpu".
        documents: that fill a row of tokens, told by positions that begin anew; 0 for none.
    """

    architecture: str
    size: Size
    device: str
    documents: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.size.batch * self.size.accumulation * self.size.sequence


def built(case: Case) -> nn.Module:
    """The model with its weights, on the device from the first, where drawing them is quick."""
    with torch.device(case.device):
        model = build_model(case.architecture, case.size)
    model.config.use_cache = False
    return model


def fitted(architecture: str, size: Size, memory_bytes: float) -> Size:
    """A size of which a training fits a device: a smaller microbatch, or else fewer layers."""
    for part in (1.0, 0.75, 0.5, 0.25, 0.125):
        for batch in (4, 2, 1):
            smaller = replace(size, layers=max(1, round(size.layers * part)), batch=batch)
            if needed_bytes(architecture, smaller) <= SHARE_TO_FILL * memory_bytes:
                return smaller
    return replace(size, layers=1, batch=1)


def needed_bytes(architecture: str, size: Size) -> float:
    """Bytes of a training's states and activations, estimated from above."""
    per_token = ACTIVATION_BYTES[architecture] * size.hidden * size.layers
    activations = size.batch * size.sequence * (per_token + LOGIT_BYTES * size.vocabulary)
    return STATE_BYTES * num_parameters(architecture, size) + activations


def num_parameters(architecture: str, size: Size) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in build_model(architecture, size).parameters())


def flops_per_token(architecture: str, size: Size) -> float:
    """FLOPs of training on a token, without those of recomputing.

    Source: arXiv 2204.02311 (PaLM), appendix B; six for every weight of a product, of which the
    head is one, and attention's products in full, as if it were not causal.
    """
    with torch.device("meta"):
        modules = list(build_model(architecture, size).modules())
    weights = sum(m.weight.numel() for m in modules if isinstance(m, nn.Linear | Conv1D))
    return 6.0 * weights + 12.0 * size.layers * size.hidden * size.sequence


def sheet_of(device_name: str) -> str | None:
    """The data sheet among `PRESETS` for a device, by its driver's name for it."""
    words = device_name.lower().replace("-", " ").split()
    if "h100" in words:
        return "h100-pcie" if "pcie" in words else "h100-sxm"
    fitting = [name for name in PRESETS if all(word in words for word in name.split("-"))]
    return max(fitting, key=len, default=None)


class Repeated(Dataset[dict[str, torch.Tensor]]):
    """A few random sequences over and over, with a mask as collators give, and labels like them.

    Packed documents have positions instead of a mask.
    """

    def __init__(self, size: Size, documents: int = 0, num_different: int = 64) -> None:
        draws = torch.Generator().manual_seed(1)
        shape = (num_different, size.sequence)
        self.tokens = torch.randint(size.vocabulary, shape, generator=draws)
        self.length = 20_000 * size.batch * size.accumulation
        self._further = {"attention_mask": torch.ones(size.sequence, dtype=torch.long)}
        if documents:
            positions = torch.arange(size.sequence) % (size.sequence // documents)
            self._further = {"position_ids": positions}

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.tokens[index % len(self.tokens)]
        return {"input_ids": tokens, "labels": tokens, **self._further}
