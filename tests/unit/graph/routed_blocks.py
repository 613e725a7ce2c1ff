"""Models with blocks of experts: a router, modules of their own, and one of several forwards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from merak.graph.ir.ir import ModelGraph
from merak.graph.ir.serialize import pack_model, unpack_model
from tests.unit.graph import stages
from tests.unit.graph import tensor_parallel_cases as cases

WIDTH, INNER, EXPERTS = 16, 24, 4
Way = Callable[["Block", Tensor], Tensor]


class Expert(nn.Module):
    """Gated, with names that differ in a number, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.w2 = nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return result


class Block(nn.Module):
    """A block, whose forward is one of several."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.way = way
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.shared = Expert()
        self.calls = {"forward": 0}

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


class Model(nn.Module):
    """Two blocks of a kind."""

    def __init__(self, make_block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(make_block() for _ in range(2))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.stem(x)
        for layer in self.layers:
            h = h + layer(F.layer_norm(h, (WIDTH,)))
        return {"loss": self.head(h).square().mean()}


def batch(seed: int) -> dict[str, Tensor]:
    """Of the last one, all tokens are alike: there are experts that nobody asks."""
    x = torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(seed))
    return {"x": x if seed else x[:1, :1].expand_as(x).contiguous()}


def traced(way: Way) -> tuple[Model, ModelGraph]:
    torch.manual_seed(0)
    model = Model(partial(Block, way)).train()
    return model, unpack_model(pack_model(cases.traced(model, batch(1))))


def assert_like_eager(
    model: nn.Module,
    graph: ModelGraph,
    draw: Callable[[int], dict[str, Tensor]] | None = None,
    zero_for_none: bool = False,
) -> None:
    """The loss and gradients; experts that nobody asks have none, or zeros where that is said."""
    of_loss = {"rtol": 1e-6, "atol": 1e-8}
    for seed in range(3):
        stages.assert_like_eager(
            graph,
            model,
            (draw or batch)(seed),
            of_loss,
            zero_for_none=zero_for_none,
            rtol=1e-5,
            atol=1e-7,
        )
