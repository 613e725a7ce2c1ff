"""Heads that pick by values, on real ranks: gradients as in one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from merak.check import Case, CheckOptions, Job, Layout
from tests.multirank.check_on import check_on
from tests.multirank.ranks import RankPool
from tests.tiers import slow
from tests.unit.graph import expert_loops

WORDS, WIDTH, LENGTH = 12, 16, 6


class Picking(nn.Module):
    """Predicts the words behind a mask by the table; the others' mean goes on through a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        layers = (
            nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH)) for _ in "12"
        )
        self.layers = nn.ModuleList(layers)
        self.after, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.words(x)
        for layer in self.layers:
            h = h + layer(h)
        hidden = x == 1
        torch._check(torch.unique_consecutive(hidden.sum(1)).numel() == 1)
        last = h[hidden, :].view(h.size(0), -1, WIDTH)[:, -1]
        logits = self.head(torch.tanh(self.after(last)))
        found = (y >= 0).nonzero()
        loss = functional.linear(h[x > 6], self.words.weight).logsumexp(-1).sum() / h.size(0)
        if found.size(0) > 0:
            rows = torch.gather(logits, 0, found.expand(found.size(0), 3))
            loss = loss + functional.cross_entropy(rows, torch.gather(y, 0, found.view(-1)))
        return {"loss": loss, "logits": logits}


def batch_of(step: int, samples: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randint(2, WORDS, (samples, LENGTH), generator=generator)
    x[:, 1] = x[:, step % 3 + 2] = 1
    y = torch.randint(-1, 3, (samples,), generator=generator)
    y[::2] = 1  # at least one of every microbatch
    return {"x": x, "y": y}


@pytest.mark.parametrize(
    ("layout", "schedule"),
    [
        slow(Layout(dp=2, pp=2), "interleaved_1f1b"),
        (Layout(tp=2, pp=2), "early_recompute"),
    ],
)
def test_as_in_one_process(pool: RankPool, layout: Layout, schedule: str) -> None:
    options = CheckOptions(schedule, num_microbatches=2, steps=2, evaluate=layout.dp == 1)
    job = Job(Case("Picking", Picking, batch_of), layout, options)
    report = check_on(pool, job)
    assert report.tolerance == 1e-5
    assert not report.kept_whole
    assert report.segments > 3


def expert_batch(step: int, samples: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(samples, LENGTH, expert_loops.WIDTH, generator=generator)}


@pytest.mark.slow
def test_a_loop_over_experts_at_the_top(pool: RankPool) -> None:
    build = partial(expert_loops.Experts, expert_loops.added, layers=3)
    options = CheckOptions(num_microbatches=2, steps=2)
    job = Job(Case("Experts", build, expert_batch), Layout(tp=2, pp=2), options)
    report = check_on(pool, job)
    assert report.tolerance == 1e-5
    assert not report.kept_whole
    assert report.segments > 3
