"""Blocks of experts as people write them: a router, a loop over a list of modules, what is around.

They are operators on all rows, whose weights tensor parallelism splits; what is no such loop stays
one opaque operator.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from merak.graph.tensor_parallel.apply import tensor_parallel
from merak.graph.trace.branches.flags import optional_parameters
from merak.graph.trace.opaque.operator import opaque_nodes
from tests.tiers import slow
from tests.unit.graph import tensor_parallel_cases as cases
from tests.unit.graph.expert_models import build
from tests.unit.graph.lockstep import assert_parity
from tests.unit.graph.routed_blocks import (
    EXPERTS,
    WIDTH,
    Block,
    Way,
    assert_like_eager,
    batch,
    traced,
)


def added_to_rows(self: Block, x: Tensor) -> Tensor:
    flat = x.view(-1, WIDTH)
    weights, chosen = torch.topk(self.gate(flat), 2)
    weights = F.softmax(weights, dim=1, dtype=torch.float).to(x.dtype)
    results = torch.zeros_like(flat)
    for i, expert in enumerate(self.experts):
        rows, place = torch.where(chosen == i)
        results[rows] += weights[rows, place, None] * expert(flat[rows])
    return results.view_as(x)


def by_a_mask(self: Block, x: Tensor) -> Tensor:
    batch, length, width = x.shape
    flat = x.view(-1, width)
    weights, chosen = torch.topk(F.softmax(self.gate(flat), dim=1, dtype=torch.float), 2, dim=-1)
    weights /= weights.sum(dim=-1, keepdim=True)
    total = torch.zeros((batch * length, width), dtype=x.dtype, device=x.device)
    mask = F.one_hot(chosen, num_classes=EXPERTS).permute(2, 1, 0)
    for i in range(EXPERTS):
        place, rows = torch.where(mask[i])
        own = flat[None, rows].reshape(-1, width)
        total.index_add_(0, rows, (self.experts[i](own) * weights[rows, place, None]).to(x.dtype))
    return total.reshape(batch, length, width)


def with_a_shared_one(self: Block, x: Tensor) -> Tensor:
    flat = x.reshape(-1, WIDTH)
    weights, chosen = self.gate(flat).softmax(-1).topk(2, -1)
    total = torch.zeros_like(flat)
    for i in range(EXPERTS):
        mask = chosen == i
        if mask.any():
            rows, place = mask.nonzero(as_tuple=True)
            own = self.experts[i](flat[rows]) * weights[rows, place].unsqueeze(-1)
            total = total.index_add(0, rows, own)
    result: Tensor = total.view(x.shape) + self.shared(x)
    return result


def one_for_each(self: Block, x: Tensor) -> Tensor:
    flat = x.view(-1, WIDTH)
    weight, chosen = self.gate(flat).softmax(-1).max(-1)
    total = torch.zeros_like(flat)
    for i, expert in enumerate(self.experts):
        mask = chosen == i
        total[mask] = expert(flat[mask]) * weight[mask].unsqueeze(-1)
    return total.view_as(x)


def with_other_scores(self: Block, x: Tensor) -> Tensor:
    """The choice is by other numbers than the weights; experts that nobody asks are left out."""
    flat = x.view(-1, WIDTH)
    scores = self.gate(flat).sigmoid()
    chosen = torch.topk(scores + 0.1, 2, dim=-1, sorted=False).indices
    weights = scores.gather(1, chosen)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5
    total = torch.zeros_like(flat)
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
    for i in range(EXPERTS):
        if counts[i]:
            rows, place = torch.where(chosen == i)
            total[rows] += self.experts[i](flat[rows]) * weights[rows, place, None]
    return (total + self.shared(flat)).view(x.shape)


def with_limited_groups(self: Block, x: Tensor) -> Tensor:
    """Experts are chosen in the better half of their groups, as in DeepSeek-V3's own code."""
    flat = x.view(-1, WIDTH)
    scores = self.gate(flat).sigmoid()
    grouped = scores.view(-1, 2, EXPERTS // 2)
    best = grouped.topk(2, dim=-1)[0].sum(-1)
    group = torch.topk(best, k=1, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(best).scatter_(1, group, 1)
    mask = mask.unsqueeze(-1).expand_as(grouped).reshape(scores.shape)
    chosen = torch.topk(scores.masked_fill(~mask.bool(), 0.0), k=1, dim=-1, sorted=False)[1]
    weights = scores.gather(1, chosen) * 2.5
    total = torch.zeros_like(flat)
    choices = F.one_hot(chosen, num_classes=EXPERTS).permute(2, 0, 1)
    for i, expert in enumerate(self.experts):
        rows, place = torch.where(choices[i])
        if rows.numel() > 0:
            own = expert(flat[rows]) * weights[rows, place].unsqueeze(-1)
            total.index_add_(0, rows, own)
    return (total + self.shared(flat)).view(x.shape)


def on_repeated_rows(self: Block, x: Tensor) -> Tensor:
    """Every token has a row for each of its choices, as in DeepSeek-MoE's own code."""
    flat = x.view(-1, WIDTH)
    weights, chosen = torch.topk(self.gate(flat).softmax(-1), k=2, dim=-1, sorted=False)
    numbers = chosen.view(-1)
    rows = flat.repeat_interleave(2, dim=0)
    made = torch.empty_like(rows)
    for i, expert in enumerate(self.experts):
        made[numbers == i] = expert(rows[numbers == i])
    summed = (made.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)
    return summed.view(x.shape) + self.shared(x)


def from_every_second_row(self: Block, x: Tensor) -> Tensor:
    """The choices are numbered in one row, the tokens are not."""
    flat = x.view(-1, WIDTH)
    chosen = torch.topk(self.gate(flat).softmax(-1), k=2, dim=-1)[1].view(-1)
    total = torch.zeros_like(flat)
    for i, expert in enumerate(self.experts):
        rows = (chosen == i).nonzero()[:, 0] // 2
        if len(rows):
            total.index_add_(0, rows, expert(flat[rows]))
    return total.view_as(x)


def scaled_by_a_count(self: Block, x: Tensor) -> Tensor:
    """A number that the code reads from the choices goes into what all tokens get."""
    flat = x.view(-1, WIDTH)
    weight, chosen = self.gate(flat).softmax(-1).max(-1)
    total = torch.zeros_like(flat)
    for i, expert in enumerate(self.experts):
        mask = chosen == i
        total[mask] = expert(flat[mask]) * weight[mask].unsqueeze(-1)
    return (total * int((chosen == 0).sum())).view_as(x)


def scaled_by_the_largest_count(self: Block, x: Tensor) -> Tensor:
    """A number that is the same whichever expert has the most tokens."""
    flat = x.view(-1, WIDTH)
    chosen = self.gate(flat).argmax(-1)
    largest = max(torch.bincount(chosen, minlength=EXPERTS).tolist())
    return one_for_each(self, x) * largest


def scaled_by_the_number_in_use(self: Block, x: Tensor) -> Tensor:
    """A number that is the same as long as no expert is idle."""
    chosen = self.gate(x.view(-1, WIDTH)).argmax(-1)
    return one_for_each(self, x) * len(chosen.unique())


def counted(self: Block, x: Tensor) -> Tensor:
    """Python's own state changes with every call."""
    self.calls["forward"] += 1
    return one_for_each(self, x)


def the_last_wins(self: Block, x: Tensor) -> Tensor:
    """Of two experts, the second one's result comes in the place of the first one's."""
    flat = x.view(-1, WIDTH)
    _, chosen = self.gate(flat).softmax(-1).topk(2, -1)
    total = torch.zeros_like(flat)
    for i, expert in enumerate(self.experts):
        rows, _ = torch.where(chosen == i)
        if len(rows):
            total[rows] = expert(flat[rows])
    return total.view_as(x)


def in_an_order(self: Block, x: Tensor) -> Tensor:
    """Every expert sees what those before it have made."""
    flat = x.view(-1, WIDTH)
    weight, chosen = self.gate(flat).softmax(-1).max(-1)
    total = torch.zeros_like(flat)
    for i, expert in enumerate(self.experts):
        mask = chosen == i
        if mask.any():
            total[mask] = expert(flat[mask]) * weight[mask].unsqueeze(-1) + total.mean()
    return total.view_as(x)


@pytest.mark.parametrize(
    "way",
    [
        by_a_mask,
        with_other_scores,
        with_limited_groups,
        on_repeated_rows,
        *(
            slow(way)
            for way in (
                added_to_rows,
                with_a_shared_one,
                one_for_each,
                from_every_second_row,
            )
        ),
    ],
)
def test_a_block_is_operators_whose_weights_are_split(way: Way) -> None:
    model, graph = traced(way)
    assert not opaque_nodes(graph)
    assert_like_eager(model, graph)
    weights = tensor_parallel(graph, None, 2).weights
    assert {n for n in graph.parameters if ".experts." in n and "w2.bias" not in n} <= set(weights)
    assert_parity(model, batch(1), None, 2)


def test_experts_that_nobody_asks_may_have_no_gradient() -> None:
    _, graph = traced(with_other_scores)
    optional = {name for segment in graph.segments for name in optional_parameters(segment)}
    assert optional == {name for name in graph.parameters if ".experts." in name}


@pytest.mark.parametrize(
    "way",
    [
        scaled_by_a_count,
        scaled_by_the_largest_count,
        scaled_by_the_number_in_use,
        counted,
        the_last_wins,
        slow(in_an_order),
    ],
)
def test_other_blocks_stay_as_they_are(way: Way) -> None:
    _, graph = traced(way)
    assert len(opaque_nodes(graph)) == 2


class Weights(nn.Module):
    """Takes no tensor, and has layers with numbers in their names."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self) -> Tensor:
        first, second = self.layers
        result: Tensor = second(first.weight) if first.weight.max() > 0 else first.weight
        return result


class Multiplied(nn.Module):
    """Calls functions by keywords, beside such a module."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = Weights()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        squared = torch.mul(input=x, other=x)
        flat = torch.reshape(input=squared, shape=(-1, WIDTH))
        return {"loss": (flat @ self.weights()).mean()}


def test_modules_without_tokens_stay_as_they_are() -> None:
    graph = cases.traced(Multiplied().train(), batch(1))
    assert len(opaque_nodes(graph)) == 1


@pytest.mark.parametrize("degree", [2, slow(4)])
def test_a_mask_may_leave_tokens_to_nobody(degree: int) -> None:
    """Switch Transformers: tokens beyond an expert's capacity are left out."""
    model, columns = build("switch"), cases.batch(padded=False)
    for module in model.modules():
        if hasattr(module, "expert_capacity"):
            module.expert_capacity = 1
    graph = cases.traced(model, columns)
    assert not opaque_nodes(graph)
    weights = tensor_parallel(graph, None, degree).weights
    assert {name for name in graph.parameters if ".expert_" in name} <= set(weights)
    assert_parity(model, columns, None, degree)
