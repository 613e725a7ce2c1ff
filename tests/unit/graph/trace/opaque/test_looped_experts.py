"""Modules that loop over the experts that some token has chosen: operators on all rows at once.

So are those that split rows by sizes which the host reads.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from merak.graph.ir.ir import ModelGraph
from merak.graph.ir.operators import GROUPED_GEMMS, family
from merak.graph.ir.serialize import pack, pack_model, unpack_model
from merak.graph.tensor_parallel.apply import auto_tensor_parallel, tensor_parallel
from merak.graph.trace.opaque.operator import opaque_nodes
from tests.tiers import one_in
from tests.unit.graph import tensor_parallel_cases as cases
from tests.unit.graph.lockstep import assert_parity
from tests.unit.graph.routed_blocks import assert_like_eager

EXPERTS, WIDTH, INNER, TOKENS = 4, 8, 6, 10
Rows = Callable[["Experts", Tensor, int], Tensor]
Loop = Callable[["Groups", Tensor, list[int]], Tensor]


class Experts(nn.Module):
    """Experts with one stack for each of their weights, visited one by one."""

    def __init__(self, rows: Rows, idle: int = 0) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, WIDTH) * 0.3)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) * 0.3)
        self.flat, self.back = (
            nn.Parameter(torch.randn(EXPERTS * INNER, WIDTH) * 0.3) for _ in range(2)
        )
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH) * 0.3)
        self.rows, self.idle = rows, idle

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        mask = F.one_hot(chosen, EXPERTS + self.idle).permute(2, 1, 0)
        for (expert,) in (mask.sum((-1, -2)) > 0).nonzero().tolist():
            if expert > EXPERTS:  # the last of the idle ones
                continue
            place, token = torch.where(mask[expert])
            made = x[token] if expert == EXPERTS else self.rows(self, x[token], expert)
            out.index_add_(0, token, made * weights[token, place, None])
        return out


class ByNumbers(Experts):
    """Finds the rows of each expert by its number, and hands on those of idle ones."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in range(EXPERTS + self.idle):
            token, place = torch.where(chosen == expert)
            if len(token):
                made = self.rows(self, x[token], expert) if expert < EXPERTS else x[token]
                out.index_add_(0, token, made * weights[token, place, None])
        return out


def gated(self: Experts, x: Tensor, expert: int) -> Tensor:
    gate, up = F.linear(x, self.up[expert]).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, self.down[expert])


def without_a_stack(self: Experts, x: Tensor, expert: int) -> Tensor:
    return F.linear(gated(self, x, expert), self.down[expert] @ self.down[expert].T.detach())


def biased(self: Experts, x: Tensor, expert: int) -> Tensor:
    inner = F.linear(x, self.up[expert])[..., :INNER].relu()
    return F.linear(inner, self.down[expert], self.bias[expert]) + self.bias[expert]


def flat(self: Experts, x: Tensor, expert: int) -> Tensor:
    up, down = self.flat.view(-1, INNER, WIDTH), self.back.view(-1, INNER, WIDTH)
    return x.matmul(up[expert].T).tanh().matmul(down[expert])


class Routed(nn.Module):
    """Every token to two of all experts, the idle ones included."""

    def __init__(self, rows: Rows, idle: int = 0, experts: type[Experts] = Experts) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS + idle, bias=False)
        self.experts = experts(rows, idle)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.stem(x)
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        return {"loss": self.experts(x, chosen, weights).square().mean()}


def batch(seed: int) -> dict[str, Tensor]:
    """Of the last one, all tokens are alike: there are experts that no token has chosen."""
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed))
    return {"x": x if seed < 2 else x[:1].expand_as(x).contiguous()}


def traced(model: nn.Module) -> ModelGraph:
    """The graph of a model, with weights of one seed, as it is read from disk."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    return unpack_model(pack_model(cases.traced(model.train(), batch(0))))


@one_in(3)
@pytest.mark.parametrize("idle", [0, 1, 2])
def test_rows_of_experts_without_weights_are_not_forgotten(idle: int) -> None:
    graph = cases.traced(Routed(gated, idle, ByNumbers).train(), batch(0))
    assert bool(opaque_nodes(graph)) == bool(idle)


def products(graph: ModelGraph) -> list[Any]:
    nodes = [n for s in graph.segments for n in s.graph.nodes if n.op == "call_function"]
    return [n for n in nodes if family(n.target) in GROUPED_GEMMS]


@one_in(3)
@pytest.mark.parametrize(
    ("rows", "idle"), [(gated, 0), (gated, 1), (gated, 2), (biased, 0), (biased, 2), (flat, 1)]
)
def test_gradients_are_those_of_eager_code(rows: Rows, idle: int) -> None:
    graph = traced(model := Routed(rows, idle))
    assert not opaque_nodes(graph) and len(products(graph)) == 2
    assert_like_eager(model, graph, batch, zero_for_none=True)


def other_weights(self: Experts, x: Tensor, expert: int) -> Tensor:
    return F.linear(x, self.flat.view(EXPERTS, INNER, WIDTH)[expert - 1]) @ self.down[expert].T


def of_some(self: Experts, x: Tensor, expert: int) -> Tensor:
    return gated(self, x, expert) * (2 if expert == 1 else 1)


def by_their_number(self: Experts, x: Tensor, expert: int) -> Tensor:
    return gated(self, x, expert) / len(x)


def over_rows(self: Experts, x: Tensor, expert: int) -> Tensor:
    return gated(self, x, expert) - gated(self, x, expert).cumsum(0)


def mixed(self: Experts, x: Tensor, expert: int) -> Tensor:
    return gated(self, x, expert).softmax(0)


def without_gradient(self: Experts, x: Tensor, expert: int) -> Tensor:
    return gated(self, x, expert) + gated(self, x, expert).detach()


def kept(self: Experts, x: Tensor, expert: int) -> Tensor:
    self.last = expert
    return gated(self, x, expert)


OTHERS = (
    other_weights, of_some, by_their_number, over_rows, mixed, without_gradient, kept,
    without_a_stack,
)  # fmt: skip


@one_in(4)
@pytest.mark.parametrize("rows", OTHERS)
def test_what_is_another_computation_stays_opaque(rows: Rows) -> None:
    graph = traced(Routed(rows))
    assert not products(graph) and len(opaque_nodes(graph)) == 1


@pytest.mark.parametrize(("rows", "names"), [(gated, ("up", "down")), (flat, ("flat", "back"))])
def test_its_weights_are_split(rows: Rows, names: tuple[str, ...]) -> None:
    graph = traced(model := Routed(rows, idle=2))
    assert {f"experts.{n}" for n in names} <= auto_tensor_parallel(graph, 2).weights.keys()
    assert_parity(model, batch(0), None, 2)


@one_in(3)
@pytest.mark.parametrize(("rows", "idle"), [(gated, 0), (gated, 2), (biased, 1)])
def test_its_experts_are_split(rows: Rows, idle: int) -> None:
    graph = traced(model := Routed(rows, idle))
    chosen = tensor_parallel(graph, None, 2, ep=2).weights
    assert "experts.down" in chosen
    assert_parity(model, batch(0), None, 2, ep=2)


class Groups(nn.Module):
    """One weight for each group of rows."""

    def __init__(self, inputs: int, outputs: int, loop: Loop) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, outputs, inputs) * 0.3)
        self.loop = loop

    def forward(self, x: Tensor, sizes: list[int]) -> Tensor:
        return self.loop(self, x, sizes)


class Split(nn.Module):
    """Every token to the two groups of its highest scores."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.stem, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up, self.down = Groups(WIDTH, 16, loop), Groups(16, WIDTH, loop)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.stem(x)
        scores, chosen = self.router(x).topk(2, dim=1)
        sizes = torch.zeros(len(x), EXPERTS).scatter(1, chosen, 1).long().sum(0).tolist()
        order = chosen.flatten().sort(stable=True)[1]
        rows = order.div(2, rounding_mode="trunc")
        found = self.down(self.up(x[rows], sizes).tanh(), sizes)
        found = found * scores.softmax(1).flatten()[order][:, None]
        return {"loss": torch.zeros_like(x).index_add(0, rows, found).square().mean()}


def by_sizes(self: Groups, x: Tensor, sizes: list[int]) -> Tensor:
    parts = x.split(sizes)
    return torch.cat([F.linear(part, self.weight[i]) for i, part in enumerate(parts)])


def sliced(self: Groups, x: Tensor, sizes: list[int]) -> Tensor:
    found, begin = [], 0
    for size, weight in zip(sizes, self.weight.unbind(), strict=True):
        found.append(x[begin : begin + size] @ weight.T)
        begin += size
    return torch.cat(found)


def of_others(self: Groups, x: Tensor, sizes: list[int]) -> Tensor:
    parts = x.split(sizes)
    return torch.cat([F.linear(part, self.weight[i - 1]) for i, part in enumerate(parts)])


def written_into(self: Groups, x: Tensor, sizes: list[int]) -> Tensor:
    found = [F.linear(part, self.weight[i]) for i, part in enumerate(x.split(sizes))]
    found[0].view(-1).mul_(2)
    return torch.cat(found)


def activated(self: Groups, x: Tensor, sizes: list[int]) -> Tensor:
    return by_sizes(self, x, sizes).relu()


def recorded(self: Groups, x: Tensor, sizes: list[int]) -> Tensor:
    self.last = list(sizes)
    return by_sizes(self, x, sizes)


@pytest.mark.parametrize("loop", [by_sizes, sliced, activated])
def test_rows_that_are_split_by_sizes(loop: Loop) -> None:
    graph = traced(model := Split(loop))
    up, down = products(graph)
    assert not opaque_nodes(graph) and up.args[2] is down.args[2]
    assert_like_eager(model, graph, batch)


@one_in(3)
@pytest.mark.parametrize("loop", [of_others, written_into, recorded])
def test_what_else_is_computed_of_them_stays_opaque(loop: Loop) -> None:
    graph = traced(Split(loop))
    assert not products(graph) and len(opaque_nodes(graph)) == 2


def test_weights_of_such_rows_are_split() -> None:
    graph = traced(model := Split(by_sizes))
    assert {"up.weight", "down.weight"} <= auto_tensor_parallel(graph, 2).weights.keys()
    assert_parity(model, batch(0), None, 2)


@pytest.mark.slow
def test_graphs_of_it_are_read_where_nothing_has_imported_the_operator() -> None:
    graph = traced(Routed(gated))
    (nodes,) = (pack(s.graph) for s in graph.segments if "experts.up" in str(s.parameters))
    code = (
        "import pickle, sys; from merak.graph.ir.serialize import unpack; "
        "print(unpack(pickle.load(sys.stdin.buffer)))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, input=pickle.dumps(nodes), capture_output=True, check=False)
    assert b"grouped_mm" in done.stdout, done.stderr.decode()
