"""Loops over experts in the forward of the model itself, writing into one tensor in many ways."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

SAMPLES, LENGTH, WIDTH, EXPERTS = 2, 10, 8, 3
TOKENS = SAMPLES * LENGTH


@dataclass(frozen=True)
class Routed:
    """What a way of writing is given: the model, flat tokens, their experts and weights."""

    model: Experts
    h: Tensor
    expert: Tensor
    weight: Tensor

    def made(self, k: int, rows: Tensor) -> Tensor:
        result: Tensor = self.model.experts[k](self.h[rows]) * self.weight[rows].unsqueeze(-1)
        return result


class Experts(nn.Module):
    """Layers of experts that a gate chooses from, all in one forward."""

    def __init__(self, way: Callable[[Routed], Tensor], layers: int = 1) -> None:
        super().__init__()
        self.way = way
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gates = nn.ModuleList(nn.Linear(WIDTH, EXPERTS) for _ in range(layers))
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
            for _ in range(EXPERTS)
        )
        self.register_buffer("total", torch.zeros(TOKENS, WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x).flatten(0, 1)
        for gate in self.gates:
            weight, expert = gate(h).softmax(-1).max(-1)
            h = h + self.way(Routed(self, torch.tanh(h), expert, weight))
        return self.head(h).square().mean()


def added(routed: Routed) -> Tensor:
    out = torch.zeros_like(routed.h)
    for k in range(EXPERTS):
        rows = torch.where(routed.expert == k)[0]
        out.index_add_(0, rows, routed.made(k, rows))
    return out


def assigned(routed: Routed) -> Tensor:
    out = torch.empty_like(routed.h)
    for k in range(EXPERTS):
        rows = torch.where(routed.expert == k)[0]
        out[rows] = routed.made(k, rows)
    return out


def by_mask(routed: Routed) -> Tensor:
    out = torch.zeros_like(routed.h)
    for k in range(EXPERTS):
        mask = routed.expert == k
        out[mask] += routed.made(k, mask.nonzero().squeeze(-1))
    return out


def scattered(routed: Routed) -> Tensor:
    out = torch.zeros_like(routed.h)
    for k in range(EXPERTS):
        rows = torch.where(routed.expert == k)[0]
        made = routed.made(k, rows)
        out.scatter_add_(0, rows[:, None].expand_as(made), made)
    return out


def by_masked_scatter(routed: Routed) -> Tensor:
    out = torch.zeros_like(routed.h)
    for k in range(EXPERTS):
        rows = torch.where(routed.expert == k)[0]
        out.masked_scatter_((routed.expert == k)[:, None], routed.made(k, rows))
    return out


def of_two(routed: Routed) -> Tensor:
    """Two experts for every token, by their mask."""
    weights, experts = routed.model.gates[0](routed.h).softmax(-1).topk(2, -1)
    mask = functional.one_hot(experts, EXPERTS).permute(2, 1, 0)
    out = torch.zeros_like(routed.h)
    for k in range(EXPERTS):
        place, rows = torch.where(mask[k])
        out.index_add_(0, rows, routed.made(k, rows) * weights[rows, place, None])
    return out


def through_a_view(routed: Routed) -> Tensor:
    """The whole is three-dimensional, its writes are in flat rows; its own work comes between."""
    out = torch.zeros(SAMPLES, LENGTH, WIDTH)
    for k in range(EXPERTS):
        rows = torch.where(routed.expert == k)[0]
        out.view(-1, WIDTH)[rows] = routed.made(k, rows)
        out = out * 1.5
    return out.flatten(0, 1)


def through_one_view(routed: Routed) -> Tensor:
    """A view that is made once, written through, and read again beside the whole."""
    out = torch.zeros(SAMPLES, LENGTH, WIDTH)
    flat = out.view(-1, WIDTH)
    for k in range(EXPERTS):
        rows = torch.where(routed.expert == k)[0]
        flat.index_add_(0, rows, routed.made(k, rows))
    return flat + out.sum((0, 1))


def by_expert(routed: Routed) -> Tensor:
    """Every expert has its own slot of one tensor."""
    out = torch.zeros(EXPERTS, TOKENS, WIDTH)
    for k in range(EXPERTS):
        rows = torch.where(routed.expert == k)[0]
        out[k].index_copy_(0, rows, routed.made(k, rows))
    return out.sum(0)


def some_columns(routed: Routed) -> Tensor:
    """Only part of the columns is written."""
    out = torch.zeros_like(routed.h)
    for k in range(EXPERTS):
        rows = torch.where(routed.expert == k)[0]
        out[:, 2:6].index_add_(0, rows, routed.made(k, rows)[:, 2:6])
    return out


def worked_on_between(routed: Routed) -> Tensor:
    """Other operators write into the tensor, too."""
    out = torch.zeros_like(routed.h)
    for k in range(EXPERTS):
        rows = torch.where(routed.expert == k)[0]
        out.index_add_(0, rows, routed.made(k, rows))
        out.mul_(0.5)
        out[:, 0] = float(k)
    return out


def collected(routed: Routed) -> Tensor:
    """Parts are put together, and brought into the old order."""
    parts = [routed.made(k, torch.where(routed.expert == k)[0]) for k in range(EXPERTS)]
    order = torch.argsort(routed.expert, stable=True)
    return torch.cat(parts)[torch.argsort(order)]


def read_before(routed: Routed) -> Tensor:
    """What the tensor was before goes into the result as well."""
    out = routed.h * 2
    before = torch.tanh(out)
    for k in range(EXPERTS):
        rows = torch.where(routed.expert == k)[0]
        out[rows] = routed.made(k, rows)
    return out * before


WAYS: Mapping[str, Callable[[Routed], Tensor]] = {
    way.__name__: way
    for way in (
        added, assigned, by_mask, scattered, by_masked_scatter, of_two, through_a_view,
        through_one_view, by_expert, some_columns, worked_on_between, collected, read_before,
    )
}  # fmt: skip


def seen_by_an_older_view(routed: Routed) -> Tensor:
    """A view of other columns, made before the writes, is read after them."""
    out = torch.zeros_like(routed.h)
    columns = out.t()
    for k in range(EXPERTS):
        rows = torch.where(routed.expert == k)[0]
        out.index_add_(0, rows, routed.made(k, rows))
    return out + columns.t()


def into_a_buffer(routed: Routed) -> Tensor:
    """The tensor is the model's own, and remembers."""
    for k in range(EXPERTS):
        rows = torch.where(routed.expert == k)[0]
        routed.model.total.index_add_(0, rows, routed.made(k, rows).detach())  # type: ignore[operator]
    return routed.h + routed.model.total  # type: ignore[operator]
