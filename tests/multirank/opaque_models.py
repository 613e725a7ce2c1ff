"""Models with modules whose inside no trace can follow, as people write them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from merak.check import Case
from tests.zoo.plain.batches import CLASSES, WIDTH, Tensors, vectors


class Gated(nn.Module):
    """Doubles what is large, and counts how often it was."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.drop = nn.Dropout(drop)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(self.drop(torch.tanh(self.up(x))))
        if y.max() > 0.6:
            y = 2 * y
            if self.training:
                self.count += 1
        return y


class HitExperts(nn.Module):
    """Loops over the experts that were chosen; the others get no gradient.

    Rows are turned around and back, which is not followed as a loop over experts.
    """

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 6)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.drop = nn.Dropout(drop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, chosen = self.router(x).softmax(-1).max(-1)
        result = torch.zeros_like(x)
        for expert in functional.one_hot(chosen, 6).sum(0).nonzero().flatten():
            rows = (chosen == expert).nonzero().flatten()
            made = self.experts[int(expert)](x[rows].flip(0)).flip(0)
            result[rows] = self.drop(made) * scores[rows, None]
        return result


class SortedExperts(nn.Module):
    """Sorts rows by expert, and splits them by numbers that depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.weight = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, chosen = self.router(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        sizes = torch.bincount(chosen, minlength=3).tolist()
        parts = [part @ w for part, w in zip(x[order].split(sizes), self.weight, strict=True)]
        return torch.cat(parts)[order.argsort()] * scores[:, None]


class _Reversed(torch.autograd.Function):
    """Keeps its result alone, and computes the rest again from a module that it is given."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: nn.Module) -> torch.Tensor:
        ctx.module = module
        with torch.no_grad():
            y = x + module(x)
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            torch.autograd.backward(ctx.module(leaf), gradient)
        assert leaf.grad is not None
        return gradient + leaf.grad, None


class Reversible(nn.Module):
    """Calls an autograd function with a module, whose weights it reads in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 20), nn.Tanh(), nn.Linear(20, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Reversed.apply(x, self.inner)  # type: ignore[no-any-return, no-untyped-call]


class Mapped(nn.Module):
    """Attends in one sample after another, by vmap, through which gradients flow."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(self.of_one)(x.unflatten(-1, (4, 4))).flatten(1)

    def of_one(self, tokens: torch.Tensor) -> torch.Tensor:
        query, key, value = self.mix(tokens).chunk(3, -1)
        return (query @ key.T).softmax(-1) @ value


class Stack(nn.Module):
    """Two blocks between layers that can be traced; the first may run twice."""

    def __init__(self, block: Callable[[], nn.Module], again: bool = False) -> None:
        super().__init__()
        self.again = again
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.between = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.embed(x)
        for block in (*self.blocks, self.blocks[0]) if self.again else self.blocks:
            h = torch.tanh(self.between(h)) + block(h)
        logits = self.head(h)
        return {"loss": functional.cross_entropy(logits, y), "logits": logits}


BLOCKS: tuple[type[nn.Module], ...] = (Gated, HitExperts, SortedExperts, Reversible, Mapped)


def batch_of(step: int, samples: int) -> Tensors:
    """The batch of a step."""
    return vectors(samples, torch.Generator().manual_seed(step))


def case_of(block: type[nn.Module]) -> Case:
    """A stack of blocks as a check takes it."""
    return Case(f"Stack of {block.__name__}", partial(Stack, block), batch_of)
