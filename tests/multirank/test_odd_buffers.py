"""Buffers that are resized by the first forward or sparse, and values that nothing reads."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.ao.quantization as quantization
from torch import nn

import merak
from tests.multirank.ranks import RankPool
from tests.multirank.training import Layout
from tests.tiers import slow

Columns = dict[str, Any]


class Resized(nn.Module):
    """Ranges of each row, whose buffers are empty until a forward has seen the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        ranges = quantization.FusedMovingAvgObsFakeQuantize
        observer = quantization.MovingAveragePerChannelMinMaxObserver
        options: Any = {"dtype": torch.qint8, "qscheme": torch.per_channel_symmetric, "ch_axis": 0}
        self.ranges = nn.ModuleList(
            ranges(observer, quant_min=-128, quant_max=127, **options) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer, ranges in zip(self.layers, self.ranges, strict=True):
            x = nn.functional.linear(x, ranges(layer.weight), layer.bias).relu()
        return {"loss": x.pow(2).mean()}


class Sparse(nn.Module):
    """A sparse matrix that is read, and one for other methods."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        for name in ("mixes", "heads"):
            self.register_buffer(name, torch.eye(8).flip(0).to_sparse(), persistent=False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = x + torch.sparse.mm(self.mixes, layer(x).relu().T).T
        return {"loss": x.pow(2).mean()}


class PassingOn(nn.Module):
    """Passes the longest length on to layers that do not read it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, **kwargs: Any) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = self.call(layer, x, **kwargs)
        return {"loss": x.pow(2).mean()}

    def call(self, layer: nn.Module, x: torch.Tensor, longest: int = 0) -> torch.Tensor:
        result: torch.Tensor = x + layer(x).relu()
        return result


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().train()


def batches(kind: Callable[[], nn.Module]) -> list[Columns]:
    torch.manual_seed(1)
    found: list[Columns] = [{"x": torch.randn(4, 8)} for _ in range(3)]
    if kind is PassingOn:
        for number, batch in enumerate(found):
            batch["longest"] = number
    return found


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def alone(kind: Callable[[], nn.Module]) -> tuple[list[float], float]:
    model, losses = made(kind), []
    optimizer = sgd(model.parameters())
    *trained, last = batches(kind)
    for batch in trained:
        optimizer.zero_grad()
        parts = [{**batch, "x": half} for half in batch["x"].chunk(2)]
        both = [model(**part)["loss"] for part in parts]
        torch.stack(both).mean().backward()
        optimizer.step()
        losses.append(sum(float(loss.detach()) for loss in both) / 2)
    return losses, float(model.eval()(**last)["loss"].detach())


def trained(layout: Layout, kinds: Sequence[Callable[[], nn.Module]]) -> list[Any]:
    dp, tp, pp = layout
    mesh = merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    found: list[Any] = []
    for kind in kinds:
        own = copy.deepcopy(batches(kind))
        for batch in own:
            batch["x"] = batch["x"].chunk(dp)[mesh.dp_rank]
            if "longest" in batch:
                batch["longest"] += mesh.rank
        *steps, last = own
        parallel = merak.parallelize(
            made(kind), steps[0], optimizer=sgd, num_microbatches=2 // dp, evaluates=True
        )
        losses = [float(parallel.step(batch)) for batch in steps]
        found.append((losses, float(parallel.evaluate(last)) if dp == 1 else None))
    return found


@pytest.mark.parametrize(
    ("layout", "kinds"),
    [
        ((1, 1, 2), (Resized, Sparse, PassingOn)),
        slow((1, 2, 1), (Resized, Sparse, PassingOn)),
        slow((2, 1, 1), (Sparse, PassingOn)),
    ],
)
def test_trains_as_in_one_process(pool: RankPool, layout: Layout, kinds: Any) -> None:
    expected = [alone(kind) for kind in kinds]
    for found in pool.run(trained, 2, layout, kinds):
        for (losses, evaluated), (known, last) in zip(found, expected, strict=True):
            assert losses == pytest.approx(known, rel=1e-5)
            assert evaluated is None or evaluated == pytest.approx(last, rel=1e-5)
