"""A forward that writes buffers has one copy of its stages, unless a schedule is pinned."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from merak.core.tensor_meta import TensorMeta
from merak.graph.segment.build import GraphSource
from merak.plan.cluster.parse import parse_cluster
from merak.plan.price.workload import Workload
from merak.plan.search.pinned import Pinned
from merak.plan.search.ranking import Ranking
from merak.plan.search.search import search

WIDTH = 16
COPIED = {"chimera", "gems"}


class Centred(nn.Module):
    """Blocks, and the moving average of what they give, which is taken from it."""

    centre: torch.Tensor

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.writes = writes
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("centre", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        found = (x - self.centre).square().mean()
        if self.writes:
            self.centre.lerp_(x.detach().mean(0), 0.1)
        return {"loss": found}


def searched(writes: bool, pinned: Pinned) -> Ranking:
    workload = Workload(
        GraphSource(Centred(writes)),
        lambda batch: {"x": TensorMeta((batch, WIDTH), torch.float32)},
        global_batch=8,
    )
    return search(workload, parse_cluster("h100:2x1"), pinned, top=50)


PINNED = Pinned(dp=1, tp=1, cp=1, pp=2, microbatch=1, zero=0, recompute="off")


@pytest.mark.parametrize("writes", [True, False])
def test_schedules_with_copies_of_stages_are_tried_where_no_buffer_is_written(
    writes: bool,
) -> None:
    found = searched(writes, PINNED)
    assert bool(COPIED & set(found.kinds)) is not writes
    why = [own.why for own in found.rejected if own.what.startswith("chimera")]
    assert any("writes the buffer centre, and each copy" in one for one in why) is writes


def test_a_pinned_one_is_taken() -> None:
    pinned = Pinned(**PINNED.choices | {"schedule": "chimera"})
    assert {own.candidate.schedule for own in searched(True, pinned).plans} == {"chimera"}
