"""Weights that are computed of parameters, or lie in parts of one, are shared out and train."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from merak.check import Case, CheckOptions, Job, Layout
from tests.multirank.check_on import check_on
from tests.multirank.ranks import RankPool

WIDTH, WIDE, HEADS = 16, 64, 4


class Scaled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input, self.weight * 0.7, self.bias)


class Masked(nn.Linear):
    mask: torch.Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("mask", (torch.arange(outputs)[:, None] % 3 > 0).float())

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input, self.mask * self.weight, self.bias)


class SparselyUpdated(nn.Linear):
    """A frozen weight with a trained sparse update, as peft's SHiRA adds it."""

    places: torch.Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.weight.requires_grad_(False)
        self.values = nn.Parameter(torch.linspace(-1, 1, 12))
        numbers = torch.arange(12)
        self.register_buffer("places", torch.stack([numbers % outputs, numbers * 7 % inputs]))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        update = torch.sparse_coo_tensor(self.places, self.values, self.weight.shape) * 0.5
        return F.linear(input, self.weight + update, self.bias)


class Quantised(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rounded = self.weight.div(0.1).round().clamp(-1, 1) * 0.1
        return F.linear(input, self.weight + (rounded - self.weight).detach(), self.bias)


class Transposed(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x @ (1 + self.weight).mT
        return found


class Reflected(nn.Module):
    """As of Householder adapters: a product of weights before the product with what enters."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * 0.1)
        self.axis = nn.Parameter(torch.randn(inputs, 1) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = self.weight - 2 * (self.weight @ self.axis) @ self.axis.T
        return F.linear(x, turned)


def normed(inputs: int, outputs: int) -> nn.Module:
    made: nn.Module = nn.utils.parametrizations.weight_norm(nn.Linear(inputs, outputs))
    return made


class Feed(nn.Module):
    def __init__(self, make: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.up, self.down = make(WIDTH, WIDE), make(WIDE, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(F.gelu(self.up(x)))
        return out


class Gated(nn.Module):
    """Gate and up in one weight of an einsum, taken apart by index or with `unbind`."""

    def __init__(self, is_unbound: bool) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, WIDTH, WIDE) * 0.1)
        self.down, self.is_unbound = nn.Linear(WIDE, WIDTH), is_unbound

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = torch.einsum("...td,cdD->c...tD", x, self.up)
        gate, up = both.unbind(0) if self.is_unbound else (both[0], both[1])
        out: torch.Tensor = x + self.down(F.gelu(gate) * up)
        return out


class Attention(nn.Module):
    """Torch's own, whose packed projection is taken apart by index."""

    def __init__(self, gives_weights: bool) -> None:
        super().__init__()
        self.own = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.gives_weights = gives_weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.own(x, x, x, need_weights=self.gives_weights)[0]
        return out


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "scaled": lambda: Feed(Scaled),
    "masked": lambda: Feed(Masked),
    "quantised": lambda: Feed(Quantised),
    "reflected": lambda: Feed(Reflected),
    "sparse update": lambda: Feed(SparselyUpdated),
    "weight norm": lambda: Feed(normed),
    "by index": lambda: Gated(False),
    "unbound": lambda: Gated(True),
    "attention": lambda: Attention(False),
    "attention with weights": lambda: Attention(True),
    "transposed": lambda: Feed(Transposed),  # whose values are large, so it is the last
}
UNSHARDED = "sparse update"
"""The sum of a weight with a sparse tensor cannot be sharded, so no weight is."""


class Stream(nn.Module):
    """One of two residual streams that attend together, as of text and an image."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.feed = nn.Linear(WIDTH, WIDTH), Feed(nn.Linear)

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        return tuple(part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)

    def forward(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.feed(x + self.out(attended))
        return found


class Streams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.text = nn.ModuleList(Stream() for _ in range(4))
        self.image = nn.ModuleList(Stream() for _ in range(4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        a, b = self.enter(x), self.enter(x[:, :3] * 0.5)
        for one, other in zip(self.text, self.image, strict=True):
            pairs = zip(one.heads(a), other.heads(b), strict=True)
            mixed = F.scaled_dot_product_attention(*(torch.cat(pair, 2) for pair in pairs))
            mixed = mixed.transpose(1, 2).flatten(2)
            length = a.shape[1]
            a, b = one(a, mixed[:, :length]), other(b, mixed[:, length:])
        return {"loss": (a - 1).pow(2).mean() + b.pow(2).mean()}


class Model(nn.Module):
    def __init__(self, *kinds: str) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(BLOCKS[kind]() for kind in kinds))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.blocks(x) - 1).pow(2).mean()}


def draw(step: int, samples: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(samples, 6, WIDTH, generator=torch.Generator().manual_seed(step))}


def test_computed_weights(pool: RankPool) -> None:
    kinds = [kind for kind in BLOCKS if kind != UNSHARDED]  # one of each
    check(pool, Case("kinds", partial(Model, *kinds), draw), 0.85)  # all but norms


@pytest.mark.slow
def test_a_weight_that_is_not_sharded(pool: RankPool) -> None:
    check(pool, Case(UNSHARDED, partial(Model, *3 * [UNSHARDED]), draw), -1.0)


@pytest.mark.slow
def test_two_streams(pool: RankPool) -> None:
    check(pool, Case("streams", Streams, draw), 0.85)


def check(pool: RankPool, case: Case, least: float) -> None:
    options = CheckOptions("1f1b", num_microbatches=2, microbatch=2, steps=2)
    checked = Job(case, Layout(tp=2, pp=2), options)
    report = check_on(pool, checked)
    assert report.segments >= 3
    assert report.tp_sharded_fraction > least
