"""Experts whose rows are split by sizes that the host reads: one grouped product of the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from merak.graph.ir.ir import ModelGraph
from merak.graph.ir.operators import GROUPED_GEMMS, family
from merak.graph.ir.serialize import pack_model, unpack_model
from merak.graph.tensor_parallel.apply import auto_tensor_parallel
from merak.graph.trace.opaque.operator import opaque_nodes
from tests.tiers import one_in
from tests.unit.graph import tensor_parallel_cases as cases
from tests.unit.graph.lockstep import assert_parity
from tests.unit.graph.routed_blocks import assert_like_eager

GROUPS, WIDTH, TOKENS = 4, 8, 6
Loop = Callable[["Groups", Tensor, list[int]], Tensor]


class Groups(nn.Module):
    """One weight for each group of rows."""

    def __init__(self, inputs: int, outputs: int, loop: Loop) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(GROUPS, outputs, inputs) * 0.3)
        self.loop = loop

    def forward(self, x: Tensor, sizes: list[int]) -> Tensor:
        return self.loop(self, x, sizes)


class Routed(nn.Module):
    """Every token to the two groups of its highest scores."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.stem, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, GROUPS, bias=False)
        self.up, self.down = Groups(WIDTH, 16, loop), Groups(16, WIDTH, loop)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.stem(x)
        scores, chosen = self.router(x).topk(2, dim=1)
        sizes = torch.zeros(len(x), GROUPS).scatter(1, chosen, 1).long().sum(0).tolist()
        order = chosen.flatten().sort(stable=True)[1]
        rows = order.div(2, rounding_mode="trunc")
        found = self.down(self.up(x[rows], sizes).tanh(), sizes)
        found = found * scores.softmax(1).flatten()[order][:, None]
        return {"loss": torch.zeros_like(x).index_add(0, rows, found).square().mean()}


def split(self: Groups, x: Tensor, sizes: list[int]) -> Tensor:
    parts = x.split(sizes)
    return torch.cat([F.linear(part, self.weight[i]) for i, part in enumerate(parts)])


def sliced(self: Groups, x: Tensor, sizes: list[int]) -> Tensor:
    found, begin = [], 0
    for size, weight in zip(sizes, self.weight.unbind(), strict=True):
        found.append(x[begin : begin + size] @ weight.T)
        begin += size
    return torch.cat(found)


def other_weights(self: Groups, x: Tensor, sizes: list[int]) -> Tensor:
    parts = x.split(sizes)
    return torch.cat([F.linear(part, self.weight[i - 1]) for i, part in enumerate(parts)])


def written_into(self: Groups, x: Tensor, sizes: list[int]) -> Tensor:
    found = [F.linear(part, self.weight[i]) for i, part in enumerate(x.split(sizes))]
    found[0].view(-1).mul_(2)
    return torch.cat(found)


def activated(self: Groups, x: Tensor, sizes: list[int]) -> Tensor:
    return split(self, x, sizes).relu()


def kept(self: Groups, x: Tensor, sizes: list[int]) -> Tensor:
    self.last = list(sizes)
    return split(self, x, sizes)


def batch(seed: int) -> dict[str, Tensor]:
    """Of the last one, all tokens are alike: there are groups without rows."""
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed))
    return {"x": x if seed < 2 else x[:1].expand_as(x).contiguous()}


def traced(loop: Loop) -> tuple[Routed, ModelGraph]:
    torch.manual_seed(0)
    model = Routed(loop).train()
    return model, unpack_model(pack_model(cases.traced(model, batch(0))))


def products(graph: ModelGraph) -> list[Any]:
    nodes = [n for s in graph.segments for n in s.graph.nodes if n.op == "call_function"]
    return [n for n in nodes if family(n.target) in GROUPED_GEMMS]


@pytest.mark.parametrize("loop", [split, sliced, activated])
def test_gradients_are_those_of_eager_code(loop: Loop) -> None:
    model, graph = traced(loop)
    up, down = products(graph)
    assert not opaque_nodes(graph) and up.args[2] is down.args[2]
    assert_like_eager(model, graph, batch)


@one_in(3)
@pytest.mark.parametrize("loop", [other_weights, written_into, kept])
def test_what_is_another_computation_stays_opaque(loop: Loop) -> None:
    _, graph = traced(loop)
    assert not products(graph) and len(opaque_nodes(graph)) == 2


def test_its_weights_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    model, graph = traced(split)
    assert {"up.weight", "down.weight"} <= auto_tensor_parallel(graph, 2).weights.keys()
    assert_parity(model, batch(0), None, 2, monkeypatch)
