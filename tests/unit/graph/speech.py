"""A small model that writes down what it hears, with a CTC loss of every kind."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import ctc_loss

WIDTH, LETTERS, FRAMES, SAMPLES = 16, 8, 12, 4


class Listener(nn.Module):
    """Frames of sound to letters; how the loss is given its labels is for those that inherit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH)
            )
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, LETTERS)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(x)
        lengths = torch.full((x.shape[0],), x.shape[1], dtype=torch.long)
        told = logits.log_softmax(-1).transpose(0, 1)
        return {"loss": self.loss(told, labels, lengths), "logits": logits}

    def loss(self, told: torch.Tensor, labels: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Padded(Listener):
    """Rows of labels, as long as the longest."""

    def loss(self, told: torch.Tensor, labels: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = nn.CTCLoss()(told, labels.clamp(min=0), lengths, (labels >= 0).sum(-1))
        return loss


class Picked(Listener):
    """All labels in a row, as transformers has it."""

    def loss(self, told: torch.Tensor, labels: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        is_label = labels >= 0
        picked = labels.masked_select(is_label)
        with torch.backends.cudnn.flags(enabled=False):
            return ctc_loss(told, picked, lengths, is_label.sum(-1), zero_infinity=True)


class Indexed(Listener):
    """The same by an index, converted afterwards; a loss for each sample."""

    def loss(self, told: torch.Tensor, labels: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        is_label = labels >= 0
        picked = labels[is_label].to(torch.int32).contiguous()
        each = ctc_loss(told, picked, lengths, is_label.sum(-1), blank=7, reduction="none")
        return each.sum() / told.shape[0]


KINDS = (Padded, Picked, Indexed)


def speech(seed: int, samples: int = SAMPLES) -> dict[str, torch.Tensor]:
    """Sounds, and words of two to five letters."""
    draws = torch.Generator().manual_seed(seed)
    labels = torch.randint(1, LETTERS - 1, (samples, 5), generator=draws)
    length = torch.randint(2, 6, (samples, 1), generator=draws)
    return {
        "x": torch.randn(samples, FRAMES, 4, generator=draws),
        "labels": labels.masked_fill(torch.arange(5) >= length, -100),
    }
