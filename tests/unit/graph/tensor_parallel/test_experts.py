"""Experts and latent attention: partial sums are reduced once, where they are smallest.

Every parameter's gradient is compared with one process's, on all ranks in lockstep.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from merak.graph.tensor_parallel.apply import (
    attributes_for,
    given_weights,
    tensor_parallel,
)
from merak.graph.tensor_parallel.features import Column, Row
from merak.graph.tensor_parallel.search.auto_shard import AutoSharder, SegmentTask
from merak.graph.tensor_parallel.search.cost import FORWARD, Collective, Transfer
from merak.ops.collectives import copy_to
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
def test_gradients_equal_those_of_one_process(name: str, degree: int, sequence: bool) -> None:
    assert_parity(build(name), cases.batch(padded=False), None, degree, sequence=sequence)


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
    between: Callable[[torch.Tensor], torch.Tensor], times: int
) -> None:
    torch.manual_seed(0)
    model, columns = Layered(between), {"x": torch.randn(8, 16)}
    features = {"up": Column(), "down": Row()}
    graph = cases.traced(model, columns)
    weights = given_weights(graph, attributes_for(graph, features), 2)
    found = collectives(graph, weights, 2)
    sums = [t.numel for t in found if t.kind is Collective.REDUCE]
    assert sums == [times * columns["x"].numel()]
    assert_parity(model, columns, features, 2)


class Alone(nn.Module):
    """Experts whose sum the loss reads, without a head behind them."""

    def __init__(self) -> None:
        super().__init__()
        config = hf.MixtralConfig(**{**SMALL, "num_local_experts": 4})
        config._experts_implementation = "grouped_mm"
        self.stem = nn.Linear(32, 32)
        self.layers = nn.ModuleList([MixtralSparseMoeBlock(config)])

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layers[0](self.stem(x)).square().mean()}


class OwnGradient(torch.autograd.Function):
    """Doubles in the forward, with a backward that a graph does not show."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2 + 0 * gradient.abs().sum()


class Opaque(Alone):
    """Routing weights with a backward of their own, as of Phimoe."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x, block = self.stem(x), self.layers[0]
        rows = x.reshape(-1, 32)
        _, weights, experts = block.gate(rows)
        found = block.experts(rows, experts, OwnGradient.apply(weights))
        return {"loss": F.linear(found, self.stem.weight).square().mean()}


@pytest.mark.parametrize("kind", [Alone, Opaque])
def test_the_largest_collective_has_the_size_of_an_activation(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, columns = kind(), {"x": torch.randn(2, 8, 32)}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    graph = cases.traced(model, columns)
    weights = tensor_parallel(graph, None, 2).weights
    assert {n.rpartition(".")[2] for n in weights if "experts" in n} == {
        "gate_up_proj",
        "down_proj",
    }
    experts = next(s for s in graph.segments if any("experts" in n for n in s.parameters))
    sent = [
        t.numel
        for t in collectives(replace(graph, segments=(experts,)), weights, 2)
        if t.kind not in FORWARD and not t.of_weights
    ]
    assert max(sent) == columns["x"].numel()
    parallel = tensor_parallel(graph, None, 2)
    rewritten = parallel(experts)[0].graph.nodes  # the block writes into the routing weights
    copies = [n.meta["tensor"].shape for n in rewritten if n.target is copy_to]
    assert sum(math.prod(shape) == columns["x"].numel() for shape in copies) == 1
    assert_parity(model, columns, None, 2)


def test_a_norm_over_all_heads_costs_one_number_a_position() -> None:
    model = build("flex_olmo")
    graph = cases.traced(model, cases.batch(padded=False))
    weights = tensor_parallel(graph, None, 2).weights
    assert {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm"} <= {n.split(".")[-2] for n in weights}
    tokens = cases.BATCH * cases.SEQUENCE
    sums = [t for t in collectives(graph, weights, 2) if t.numel == tokens]
    assert Counter(t.kind for t in sums) == {Collective.REDUCE: 4, Collective.COPY: 4}
