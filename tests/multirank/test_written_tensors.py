"""What forward writes on one stage and reads on another is as in eager code, also recomputed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import merak
from tests.multirank.ranks import RankPool
from tests.multirank.training import Layout
from tests.tiers import slow


class Averages(nn.Module):
    """Moving averages and a scratch, written or replaced without gradients on the way."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(40, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 40)
        self.register_buffer("scratch", torch.zeros(2, 6, 16))
        self.mean = torch.zeros(16)
        self.means = [torch.zeros(16)]
        self.late, self.queue = torch.zeros(16), [torch.zeros(16), torch.zeros(16)]

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(ids)
        with torch.no_grad():
            self.scratch.copy_(x)
            for mean in (self.mean, self.means[0]):
                mean.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        for block in self.blocks:
            x = torch.tanh(block(x)) * (1 + self.scratch) - self.mean
        x = x * (1 + self.late) - self.queue[0]
        self.late = 0.9 * self.late + 0.1 * x.detach().mean((0, 1))
        self.queue.append(x.detach().mean((0, 1)))
        self.queue.pop(0)
        logits = self.head(x - self.means[0])
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def batch(number: int) -> dict[str, torch.Tensor]:
    ids = (torch.arange(12).view(2, 6) * (number + 3)) % 40
    return {"ids": ids, "labels": ids.roll(1, 1)}


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)  # type: ignore[arg-type]


def trained_alone() -> list[float]:
    model, losses = Averages(), []
    optimizer = sgd(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        both = [model(**batch(2 * step + part))["loss"] for part in range(2)]
        torch.stack(both).mean().backward()
        optimizer.step()
        losses.append(sum(float(loss.detach()) for loss in both) / 2)
    return losses


def trained(layout: Layout, recompute: str) -> list[float]:
    dp, tp, pp = layout
    merak.init(dp=dp, tp=tp, pp=pp, device="cpu")

    def whole(step: int) -> dict[str, torch.Tensor]:
        first, second = batch(2 * step), batch(2 * step + 1)
        return {name: torch.cat([first[name], second[name]]) for name in first}

    parallel = merak.parallelize(
        Averages(), whole(0), optimizer=sgd, num_microbatches=2, recompute=recompute
    )
    return [float(parallel.step(whole(step))) for step in range(3)]


@pytest.mark.parametrize(
    ("layout", "recompute"),
    [((1, 1, 2), "full"), slow((1, 2, 2), "off")],
)
def test_later_stages_read_what_is_written(pool: RankPool, layout: Layout, recompute: str) -> None:
    num_ranks = layout[0] * layout[1] * layout[2]
    for found in pool.run(trained, num_ranks, layout, recompute):
        assert found == pytest.approx(trained_alone(), rel=1e-4)
