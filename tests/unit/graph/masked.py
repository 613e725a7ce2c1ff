"""Models that mask by NumPy's or Python's draws, and eager runs that draw the same."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray

from merak.core.random import seed_for
from tests.unit.graph.dropped_layers import WIDTH, Stack


def spans(
    shape: tuple[int, int], often: float, *, lengths: torch.Tensor | None = None
) -> NDArray[np.bool_]:
    """Masked places of each row, no two the same, within its length."""
    rows, size = shape
    mask = np.zeros((rows, size), dtype=bool)
    ends = [size] * rows if lengths is None else lengths.tolist()
    number = int(often * size + np.random.rand(1).item())
    for row, end in enumerate(ends):
        mask[row, np.random.choice(np.arange(end), min(number, end), replace=False)] = True
    return mask


def picked(size: int) -> NDArray[np.float32]:
    """Some places, by Python's generator."""
    found = np.ones(size, dtype=np.float32)
    found[random.sample(range(size), 3)] = 0.0
    return found


class Masked(Stack):
    """Each row by a mask of its own."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            mask = torch.from_numpy(spans((x.shape[0], WIDTH), 0.3)).to(x.device)
            x = x.masked_fill(mask, 0.0)
        for block in self.blocks:
            x = block(x)
        return x


class Replaced(Stack):
    """Masked places get a parameter, as SpecAugment's do, in a model that notes its first call."""

    began = False

    def run(self, x: torch.Tensor) -> torch.Tensor:
        if not self.began:
            self.began = True
        mask = torch.tensor(spans((x.shape[0], WIDTH), 0.3), device=x.device, dtype=torch.bool)
        x = x.clone()
        x[mask] = self.head.weight.sum()
        for block in self.blocks:
            x = block(x)
        return x


class Lengthy(Stack):
    """A mask that depends on the batch, and one for all rows."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embed(x)
        mask = torch.tensor(spans((x.shape[0], WIDTH), 0.5, lengths=lengths), dtype=torch.bool)
        hidden[mask] = 0.0
        hidden = hidden * torch.as_tensor(picked(WIDTH), dtype=x.dtype)
        for block in self.blocks:
            hidden = block(hidden)
        return {"loss": self.head(hidden).square().mean()}


@contextmanager
def same_masks() -> Iterator[None]:
    """Let eager draw what Merak's graph draws, in the order of the model's code."""
    numbers = count(1)

    def seeded(function: Any) -> Any:
        def draw(*args: Any, **kwargs: Any) -> Any:
            seed = seed_for(torch.initial_seed(), "choice", next(numbers))
            random.seed(seed)
            np.random.seed(seed % 2**32)
            return function(*args, **kwargs)

        return draw

    here = sys.modules[__name__]
    with (
        mock.patch.object(here, "spans", seeded(spans)),
        mock.patch.object(here, "picked", seeded(picked)),
    ):
        yield
