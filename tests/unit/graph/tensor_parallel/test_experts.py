"""Experts and latent attention: partial sums are reduced once, where they are smallest.

Every parameter's gradient is compared with one process's, on all ranks in lockstep.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from merak.graph.tensor_parallel.apply import (
    attributes_for,
    given_weights,
    tensor_parallel,
)
from merak.graph.tensor_parallel.features import Column, Row
from merak.graph.tensor_parallel.search.auto_shard import AutoSharder, SegmentTask
from merak.graph.tensor_parallel.search.cost import FORWARD, Collective, Transfer
from tests.tiers import slow
from tests.unit.graph import tensor_parallel_cases as cases
from tests.unit.graph.expert_models import MODELS, SMALL, build
from tests.unit.graph.lockstep import assert_parity


def collectives(graph: Any, weights: Any, degree: int) -> list[Transfer]:
    sharder = AutoSharder(graph.parameters, degree)
    found: list[Transfer] = []
    for segment in graph.segments:
        own = {n: weights[n] for n in segment.parameters if n in weights}
        found += sharder(SegmentTask(segment, own, frozenset(segment.parameters))).transfers
    return found


@pytest.mark.parametrize(
    "name,degree,sequence",
    [
        ("deepseek_v3", 4, False),
        ("gpt_oss", 2, False),
        *(slow(name, 2, True) for name in MODELS),
        *(slow(name, 4, False) for name in MODELS if name != "deepseek_v3"),
    ],
)
def test_gradients_equal_those_of_one_process(
    name: str, degree: int, sequence: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_parity(
        build(name), cases.batch(padded=False), None, degree, monkeypatch, sequence=sequence
    )


# JetMoe's attention is routed, too: its queries are twice as large as an activation.
OTHERS = [name for name in MODELS if name not in ("mixtral", "jetmoe")]


@pytest.mark.parametrize("name", ["mixtral", *map(slow, OTHERS)])
def test_an_expert_block_costs_what_a_dense_block_costs(name: str) -> None:
    graph = cases.traced(build(name), cases.batch(padded=False))
    weights = tensor_parallel(graph, None, 2).weights
    sizes = {n: math.prod(m.shape) for n, m in graph.parameters.items() if ".layers." in n}
    assert sum(size for n, size in sizes.items() if n in weights) >= 0.8 * sum(sizes.values())
    assert any("experts" in n for n in weights)
    hidden = cases.BATCH * cases.SEQUENCE * SMALL["hidden_size"]
    blocks = [t for t in collectives(graph, weights, 2) if not t.of_weights and t.numel >= hidden]
    assert all(transfer.numel == hidden for transfer in blocks)
    counts = Counter(transfer.kind in FORWARD for transfer in blocks)
    assert counts[True] <= 4 + 1 and counts[False] <= 4 + 1  # with the vocabulary's


class Combined(nn.Module):
    """Every token four times through two products, and the four weighted and added."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(shape)) for shape in ((32, 16), (16, 32)))
        self.bias, self.router = nn.Parameter(torch.randn(16)), nn.Parameter(torch.randn(1, 16))
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        many = x.repeat_interleave(4, 0)
        found = self.between(F.linear(F.linear(many, self.up).relu(), self.down, self.bias))
        found = found * F.linear(many, self.router).sigmoid()
        return x + found.view(-1, 4, 16).sum(1)


class Layered(nn.Module):
    """One such layer, which is one segment."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 16)
        self.layers = nn.ModuleList([Combined(between)])

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layers[0](self.stem(x)).square().mean()}


@pytest.mark.parametrize(
    "between,times",
    [
        (lambda x: x.clone(), 1),  # linear: reduced behind the combine
        (torch.relu, 4),
        (lambda x: x.bfloat16().float(), 4),  # summands are not rounded
    ],
)
def test_sums_travel_through_what_is_linear_in_them_alone(
    between: Callable[[torch.Tensor], torch.Tensor], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, columns = Layered(between), {"x": torch.randn(8, 16)}
    features = {"up": Column(), "down": Row()}
    graph = cases.traced(model, columns)
    weights = given_weights(graph, attributes_for(graph, features), 2)
    found = collectives(graph, weights, 2)
    sums = [t.numel for t in found if t.kind is Collective.REDUCE]
    assert sums == [times * columns["x"].numel()]
    assert_parity(model, columns, features, 2, monkeypatch)
