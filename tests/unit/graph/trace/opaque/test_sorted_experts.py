"""Blocks that sort the rows of all tokens by expert, and give each expert its range of them.

They are operators on all rows, whose weights tensor parallelism splits; where ranges are not those
of the experts' rows, or rows are left out, the block stays one opaque operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from merak.graph.tensor_parallel.apply import tensor_parallel
from merak.graph.trace.branches.flags import optional_parameters
from merak.graph.trace.opaque.operator import opaque_nodes
from tests.tiers import slow
from tests.unit.graph import tensor_parallel_cases as cases
from tests.unit.graph.lockstep import assert_parity
from tests.unit.graph.routed_blocks import (
    EXPERTS,
    INNER,
    WIDTH,
    Block,
    Model,
    Way,
    assert_like_eager,
    batch,
    traced,
)


def routed(self: Block, flat: Tensor) -> tuple[Tensor, Tensor]:
    weights, chosen = torch.topk(self.gate(flat).softmax(-1), k=2, dim=-1, sorted=False)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20), chosen


def joined(self: Block, x: Tensor) -> Tensor:
    """As DeepSeek-V3's own code: results are concatenated, and put back in order."""
    flat = x.view(-1, WIDTH)
    weights, chosen = routed(self, flat)
    counts = chosen.new_zeros((chosen.shape[0], len(self.experts)))
    counts.scatter_(1, chosen, 1)
    per_expert = counts.sum(dim=0).cpu().numpy()
    order = chosen.view(-1).argsort()
    rows = flat[order // chosen.shape[1]]
    outputs, start = [], 0
    for i, number in enumerate(per_expert):
        end = start + number
        if number == 0:
            continue
        outputs.append(self.experts[i](rows[start:end]))
        start = end
    outs = torch.cat(outputs, dim=0) if len(outputs) else rows.new_empty(0)
    new = torch.empty_like(outs)
    new[order] = outs
    summed = new.view(*chosen.shape, -1).type(weights.dtype).mul_(weights.unsqueeze(-1)).sum(1)
    return summed.type(new.dtype).view(x.shape) + self.shared(x)


class AddAuxiliaryLoss(torch.autograd.Function):
    """Passes its input on, and gives the loss a gradient of one, as in DeepSeek-MoE's own code."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype, ctx.required = loss.dtype, loss.requires_grad
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        own = torch.ones(1, dtype=ctx.dtype, device=gradient.device) if ctx.required else None
        return gradient, own


def with_an_auxiliary_loss(self: Block, x: Tensor) -> Tensor:
    """As DeepSeek-MoE's own code: the order is cut, and results are added by their tokens.

    The router's gradient comes of the experts' balance as well.
    """
    flat = x.view(-1, WIDTH)
    scores = self.gate(flat).softmax(-1)
    weights, chosen = torch.topk(scores, k=2, dim=-1, sorted=False)
    often = F.one_hot(chosen.view(-1), num_classes=EXPERTS).float().mean(0)
    loss = (scores.mean(0) * often * EXPERTS).sum() * 0.5
    numbers, flat_weights = chosen.view(-1), weights.view(-1, 1)
    order = numbers.argsort()
    ends = numbers.bincount().cpu().numpy().cumsum(0)
    tokens, total = order // 2, torch.zeros_like(flat)
    for i, end in enumerate(ends):
        start = 0 if i == 0 else ends[i - 1]
        if start == end:
            continue
        own = tokens[start:end]
        made = self.experts[i](flat[own])
        made.mul_(flat_weights[order[start:end]])
        total.scatter_add_(0, own.view(-1, 1).repeat(1, flat.shape[-1]), made)
    y: Tensor = AddAuxiliaryLoss.apply(total.view(x.shape), loss)
    return y + self.shared(x)


def cut_by_sizes(self: Block, x: Tensor) -> Tensor:
    """As torchtitan's loop: rows are weighed first, cut by a list of sizes, and added."""
    flat = x.view(-1, WIDTH)
    weights, chosen = routed(self, flat)
    sizes = torch.bincount(chosen.view(-1), minlength=EXPERTS).tolist()
    order = torch.argsort(chosen.view(-1), stable=True)
    index = (order // 2).reshape(-1, 1).expand(-1, WIDTH)
    rows = torch.gather(flat, dim=0, index=index) * weights.view(-1)[order].reshape(-1, 1)
    padding = rows.shape[0] - sum(sizes)
    parts = torch.split(rows[: sum(sizes)], split_size_or_sections=sizes, dim=0)
    outs = torch.cat([self.experts[i](part) for i, part in enumerate(parts)], dim=0)
    outs = torch.vstack((outs, outs.new_zeros((padding, outs.shape[-1]))))
    return self.shared(x) + torch.zeros_like(flat).scatter_add(0, index, outs).view(x.shape)


def into_ranges(self: Block, x: Tensor) -> Tensor:
    """Sorted numbers, ends of their ranges as tensors, and results that come where rows lie."""
    flat = x.view(-1, WIDTH)
    weights, chosen = routed(self, flat)
    numbers, order = torch.sort(chosen.flatten())
    ends = torch.cumsum(torch.bincount(numbers, minlength=EXPERTS), 0)
    rows = flat.index_select(0, order // 2)
    outs, start = torch.empty_like(rows), 0
    for i, end in enumerate(ends):
        outs[start:end] = self.experts[i](rows[start:end])
        start = end
    outs = outs * weights.flatten()[order, None]
    return torch.zeros_like(flat).index_add_(0, order // 2, outs).view(x.shape)


def added_by_numbers(self: Block, x: Tensor) -> Tensor:
    flat = x.view(-1, WIDTH)
    weights, chosen = routed(self, flat)
    order = chosen.flatten().argsort()
    tokens, choices = order // 2, order % 2
    total, start = torch.zeros_like(flat), 0
    for expert, number in zip(
        self.experts, chosen.flatten().bincount(minlength=EXPERTS).tolist(), strict=True
    ):
        own = tokens.narrow(0, start, number)
        picked = weights[own, choices[start : start + number]]
        total.index_add_(0, own, expert(flat.index_select(0, own)) * picked[:, None])
        start += number
    return total.view_as(x)


def added_in_place(self: Block, x: Tensor) -> Tensor:
    flat = x.view(-1, WIDTH)
    weights, chosen = routed(self, flat)
    order = chosen.flatten().argsort()
    ends = chosen.flatten().bincount(minlength=EXPERTS).cumsum(0).tolist()
    tokens, of_rows = order // 2, weights.flatten()[order]
    total = torch.zeros_like(flat)
    for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        own = tokens[start:end]
        total[own] += of_rows[start:end, None] * self.experts[i](flat[own])
    return total.view_as(x)


def put_by_numbers(self: Block, x: Tensor) -> Tensor:
    flat = x.view(-1, WIDTH)
    weights, chosen = routed(self, flat)
    order = chosen.flatten().argsort()
    made, start = flat.new_empty(order.shape[0], WIDTH), 0
    for i, number in enumerate(chosen.flatten().bincount(minlength=EXPERTS).tolist()):
        own = order[start : start + number]
        made[own] = self.experts[i](flat[own // 2])
        start += number
    return (made.view(-1, 2, WIDTH) * weights[:, :, None]).sum(1).view(x.shape)


def all_but_one(self: Block, x: Tensor) -> Tensor:
    """Every token chooses all experts but one."""
    flat = x.view(-1, WIDTH)
    weights, chosen = self.gate(flat).softmax(-1).topk(EXPERTS - 1, -1)
    total = torch.zeros_like(flat)
    for i, expert in enumerate(self.experts):
        rows, place = torch.where(chosen == i)
        if len(rows):
            total[rows] += expert(flat[rows]) * weights[rows, place, None]
    return total.view_as(x)


def sorted_all_but_one(self: Block, x: Tensor) -> Tensor:
    flat = x.view(-1, WIDTH)
    weights, chosen = self.gate(flat).softmax(-1).topk(EXPERTS - 1, -1)
    order = chosen.flatten().argsort()
    rows, outs, start = flat[order // (EXPERTS - 1)], [], 0
    for i, number in enumerate(chosen.flatten().bincount(minlength=EXPERTS).tolist()):
        if number:
            outs.append(self.experts[i](rows[start : start + number]))
        start += number
    made = torch.cat(outs) * weights.flatten()[order, None]
    return torch.zeros_like(flat).index_add(0, order // (EXPERTS - 1), made).view_as(x)


def one_for_each(self: Block, x: Tensor) -> Tensor:
    """There are as many rows as tokens; numbers of their ranges are found in what is sorted."""
    flat = x.view(-1, WIDTH)
    weight, chosen = self.gate(flat).softmax(-1).max(-1)
    numbers, order = chosen.sort(stable=True)
    ends = torch.searchsorted(numbers, torch.arange(EXPERTS + 1)).tolist()
    rows, outs = flat[order], torch.empty_like(flat)
    seen = outs.view(-1, WIDTH)
    for i, expert in enumerate(self.experts):
        outs[ends[i] : ends[i + 1]] = expert(rows[ends[i] : ends[i + 1]])
    made = torch.zeros_like(flat)
    made[order] = seen
    return (made * weight[:, None]).view_as(x)


FOLLOWED = (
    joined,
    with_an_auxiliary_loss,
    into_ranges,
    all_but_one,
    *map(slow, (cut_by_sizes, added_by_numbers, added_in_place, put_by_numbers)),
    *map(slow, (sorted_all_but_one, one_for_each)),
)


@pytest.mark.parametrize("way", FOLLOWED)
def test_a_block_is_operators_whose_weights_are_split(way: Way) -> None:
    model, graph = traced(way)
    assert not opaque_nodes(graph)
    assert_like_eager(model, graph)
    weights = tensor_parallel(graph, None, 2).weights
    assert {n for n in graph.parameters if ".experts." in n and "w2.bias" not in n} <= set(weights)
    assert_parity(model, batch(1), None, 2)


@pytest.mark.parametrize(("way", "skips_idle"), [(joined, True), (into_ranges, False)])
def test_experts_that_nobody_asks_have_gradients_as_in_eager_code(
    way: Way, skips_idle: bool
) -> None:
    _, graph = traced(way)
    optional = {name for segment in graph.segments for name in optional_parameters(segment)}
    assert optional == {n for n in graph.parameters if skips_idle and ".experts." in n}


def with_parts(cut: Callable[[Tensor, list[int]], list[tuple[int, int]]]) -> Way:
    """A block whose experts get other parts of the sorted rows than their own."""

    def way(self: Block, x: Tensor) -> Tensor:
        flat = x.view(-1, WIDTH)
        weights, chosen = routed(self, flat)
        order = chosen.flatten().argsort()
        counts = chosen.flatten().bincount(minlength=EXPERTS).tolist()
        rows, outs = flat[order // 2], flat.new_zeros(order.shape[0], WIDTH)
        for i, (start, end) in enumerate(cut(rows, counts)):
            outs[start:end] = self.experts[i](rows[start:end])
        outs = outs * weights.flatten()[order, None]
        return torch.zeros_like(flat).index_add(0, order // 2, outs).view_as(x)

    return way


def limited(rows: Tensor, counts: list[int]) -> list[tuple[int, int]]:
    """No expert gets more rows than fit; those behind are left out."""
    capacity = int(1.5 * len(rows) / EXPERTS)
    starts = [sum(counts[:i]) for i in range(EXPERTS)]
    return [(start, start + min(n, capacity)) for start, n in zip(starts, counts, strict=True)]


def rarely_limited(rows: Tensor, counts: list[int]) -> list[tuple[int, int]]:
    """As many fit as two thirds of all rows."""
    capacity = len(rows) * 2 // 3 // 2 + 1
    starts = [sum(counts[:i]) for i in range(EXPERTS)]
    return [(start, start + min(n, capacity)) for start, n in zip(starts, counts, strict=True)]


def moved(rows: Tensor, counts: list[int]) -> list[tuple[int, int]]:
    """Every expert gets the rows of the next one."""
    starts = [sum(counts[:i]) for i in (1, 2, 3, 0)]
    return [(a, a + counts[i]) for a, i in zip(starts, (1, 2, 3, 0), strict=True)]


def without_the_last(rows: Tensor, counts: list[int]) -> list[tuple[int, int]]:
    ends = [sum(counts[: i + 1]) for i in range(EXPERTS)]
    return list(zip([0, *ends], ends[:-1], strict=False))


def descending(self: Block, x: Tensor) -> Tensor:
    """Results are concatenated from the last expert to the first, and lie as if they were not."""
    flat = x.view(-1, WIDTH)
    _, chosen = routed(self, flat)
    order = chosen.flatten().argsort()
    rows = flat[order // 2].split(chosen.flatten().bincount(minlength=EXPERTS).tolist())
    outs = torch.cat([self.experts[i](rows[i]) for i in reversed(range(EXPERTS))])
    return torch.zeros_like(flat).index_add(0, order // 2, outs).view_as(x)


def scaled_by_its_size(self: Block, x: Tensor) -> Tensor:
    """An expert's rows are divided by their number."""
    flat = x.view(-1, WIDTH)
    _, chosen = routed(self, flat)
    order = chosen.flatten().argsort()
    rows = flat[order // 2].split(chosen.flatten().bincount(minlength=EXPERTS).tolist())
    outs = torch.cat([self.experts[i](r) / max(len(r), 1) for i, r in enumerate(rows)])
    return torch.zeros_like(flat).index_add(0, order // 2, outs).view_as(x)


def written_to(self: Block, x: Tensor) -> Tensor:
    """What an expert writes into its rows is read where they come from."""
    flat = x.view(-1, WIDTH)
    _, chosen = routed(self, flat)
    order = chosen.flatten().argsort()
    rows, outs, start = flat[order // 2], [], 0
    for i, number in enumerate(chosen.flatten().bincount(minlength=EXPERTS).tolist()):
        outs.append(self.experts[i](rows[start : start + number].mul_(2.0)))
        start += number
    made = torch.cat(outs) + rows
    return torch.zeros_like(flat).index_add(0, order // 2, made).view_as(x)


def more_than_one(self: Block, x: Tensor) -> Tensor:
    """An expert with a single row does not compute it."""
    flat = x.view(-1, WIDTH)
    _, chosen = routed(self, flat)
    order = chosen.flatten().argsort()
    rows = flat[order // 2].split(chosen.flatten().bincount(minlength=EXPERTS).tolist())
    outs = torch.cat([self.experts[i](r) if len(r) > 1 else 0 * r for i, r in enumerate(rows)])
    return torch.zeros_like(flat).index_add(0, order // 2, outs).view_as(x)


def in_an_autocast(self: Block, x: Tensor) -> Tensor:
    """Products are in another type than where the block is called."""
    with torch.autocast("cpu", torch.bfloat16):
        return joined(self, x).to(x.dtype)


def cleared(self: Block, x: Tensor) -> Tensor:
    """Results of the first expert are zeros again behind the loop."""
    flat = x.view(-1, WIDTH)
    _, chosen = routed(self, flat)
    order = chosen.flatten().argsort()
    sizes = chosen.flatten().bincount(minlength=EXPERTS).tolist()
    rows = flat[order // 2].split(sizes)
    outs = torch.cat([self.experts[i](own) for i, own in enumerate(rows)])
    outs[: sizes[0]] = 0.0
    return torch.zeros_like(flat).index_add(0, order // 2, outs).view_as(x)


OTHERS = (
    in_an_autocast,
    more_than_one,
    slow(cleared),
    with_parts(limited),
    with_parts(rarely_limited),
    descending,
    written_to,
    *(slow(with_parts(cut)) for cut in (moved, without_the_last)),
    slow(scaled_by_its_size),
)


@pytest.mark.parametrize("way", OTHERS)
def test_other_blocks_stay_as_they_are(way: Way) -> None:
    _, graph = traced(way)
    assert len(opaque_nodes(graph)) == 2


class Stacks(nn.Module):
    """A block with stacks of weights and biases."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.w1 = nn.Parameter(0.2 * torch.randn(EXPERTS, INNER, WIDTH))
        self.w2 = nn.Parameter(0.2 * torch.randn(EXPERTS, WIDTH, INNER))
        self.b1 = nn.Parameter(0.2 * torch.randn(EXPERTS, INNER))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, WIDTH)
        weights, chosen = self.gate(flat).softmax(-1).topk(2, -1)
        order = chosen.flatten().argsort(stable=True)
        sizes = chosen.flatten().bincount(minlength=EXPERTS).tolist()
        outs = []
        for i, own in enumerate(flat[order // 2].split(sizes)):
            h = F.silu(torch.matmul(own, self.w1[i].transpose(-2, -1)) + self.b1[i])
            outs.append(torch.matmul(h, self.w2[i].transpose(-2, -1)))
        made = torch.cat(outs, dim=0) * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(flat).index_add(0, order // 2, made).view_as(x)


class OnRanges(nn.Module):
    """Experts that are called with sorted rows, and with how many of them each has."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(0.2 * torch.randn(EXPERTS, INNER, WIDTH))
        self.w2 = nn.Parameter(0.2 * torch.randn(EXPERTS, WIDTH, INNER))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        sizes, outs = counts.tolist(), []
        padding = x.shape[0] - sum(sizes)
        for i, own in enumerate(torch.split(x[: sum(sizes)], sizes, dim=0)):
            h = F.silu(torch.matmul(own, self.w1[i].transpose(-2, -1)))
            outs.append(torch.matmul(h, self.w2[i].transpose(-2, -1)))
        made = torch.cat(outs, dim=0)
        return torch.vstack((made, made.new_zeros((padding, made.shape[-1]))))


class Counted(nn.Module):
    """A block around them, as torchtitan's."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = OnRanges()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, WIDTH)
        scores, chosen = self.gate(flat).sigmoid().topk(2, dim=1)
        counts = F.one_hot(chosen.view(-1), num_classes=EXPERTS).sum(0)
        order = torch.argsort(chosen.view(-1), stable=True)
        index = (order // 2).reshape(-1, 1).expand(-1, WIDTH)
        rows = torch.gather(flat, dim=0, index=index) * scores.view(-1)[order].reshape(-1, 1)
        made = self.experts(rows, counts)
        return torch.zeros_like(flat).scatter_add(0, index, made).view_as(x)


@pytest.mark.parametrize(
    ("block", "ep"), [(Stacks, 1), (Stacks, 2), (Counted, 2), slow(Counted, 1)]
)
def test_stacks_of_weights_are_split(block: type[nn.Module], ep: int) -> None:
    torch.manual_seed(0)
    model = Model(block).train()
    graph = cases.traced(model, batch(1))
    assert not opaque_nodes(graph)
    weights = tensor_parallel(graph, None, 2, ep=ep).weights
    names = {n for n in graph.parameters if n.rpartition(".")[2] in ("w1", "w2")}
    assert len(names) == 4 and names <= set(weights)
    assert_like_eager(model, graph)
    assert_parity(model, batch(1), None, 2, ep=ep)
