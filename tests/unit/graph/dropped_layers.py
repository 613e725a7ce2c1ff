"""Models that drop layers by chance, and eager runs that draw what Merak's graphs draw."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

from merak.graph.trace.branches.rng_stream import draw_from_stream

Batch = dict[str, torch.Tensor]
WIDTH, DEPTH = 8, 4


class Block(nn.Module):
    """A feed-forward block with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def branch(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.branch(x)


class Stack(nn.Module):
    """Blocks between an embedding and a head; how they are dropped is for those that inherit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.head(self.run(self.embed(x))).square().mean()}


class Skipping(Stack):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.training and torch.rand(()) < 0.5:
                continue
            x = block(x)
        return x


class Surviving(Stack):
    """What runs is scaled by how seldom it runs; the draw is Python's."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            keep = 1 - 0.5 * (i + 1) / DEPTH
            x = x + block.branch(x) / keep if random.random() < keep else x
        return x


class Numpy(Stack):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            dropped = np.random.uniform(0, 2)
            if not self.training or (dropped > 1.2):
                x = block(x)
        return x


class AllAtOnce(Stack):
    """One draw for all layers, decided before the first of them."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        runs = [bool(r) for r in torch.rand(DEPTH) < 0.6]
        for block, run in zip(self.blocks, runs, strict=True):
            x = block(x) if run else x
        return x


class Progressive(Stack):
    """Layers are kept the less often the later it is and the deeper they are."""

    theta: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("theta", torch.tensor(0.3))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            keep = 1 - (1 - self.theta) * (i + 1) / DEPTH
            if torch.bernoulli(keep):
                x = x + block.branch(x) / keep
        return x


class Halves(Stack):
    """Two choices to a block, one of which is about two layers."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for one, two in zip(self.blocks[::2], self.blocks[1::2], strict=True):
            if torch.rand(1).item() > 0.4:
                x = two(one(x))
            if torch.rand(1) > 0.4:
                x = one(x)
        return x


PLAIN = (Skipping, Surviving, Numpy, AllAtOnce, Progressive, Halves)


def plain_batch() -> Batch:
    return {"x": torch.randn(3, 4, generator=torch.Generator().manual_seed(1))}


@contextmanager
def same_draws() -> Iterator[None]:
    """Let eager draw what Merak's graph draws, in the order of the model's code."""
    numbers = count(1)

    def unit() -> float:
        return float(draw_from_stream(next(numbers), "aten.rand.default", [], dtype=torch.float64))

    def rand(*sizes: Any) -> torch.Tensor:
        size = list(sizes[0]) if sizes and not isinstance(sizes[0], int) else list(sizes)
        return draw_from_stream(next(numbers), "aten.rand.default", size)

    with (
        mock.patch.object(torch, "rand", rand),
        mock.patch.object(
            torch,
            "bernoulli",
            lambda p: draw_from_stream(next(numbers), "aten.bernoulli.default", p),
        ),
        mock.patch.object(random, "random", unit),
        mock.patch.object(random, "uniform", lambda a, b: unit() * (b - a) + a),
        mock.patch.object(np.random, "uniform", lambda a, b: unit() * (b - a) + a),
    ):
        yield
