"""Opaque modules in plans: a price and a search name the one that leaves too few segments."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from merak.core.errors import PlanError
from merak.core.tensor_meta import Signature, TensorMeta
from merak.graph.segment.build import GraphSource
from merak.plan.price.candidate import Candidate
from merak.plan.price.step import price
from merak.plan.price.workload import Workload
from merak.plan.search.pinned import Pinned
from merak.plan.search.search import search
from tests.unit.plan.price.test_step import cluster


class Branch(nn.Module):
    """Doubles what is large."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.blocks(x)
        return 2 * y if y.max() > 0.5 else y


class Model(nn.Module):
    """A large embedding, which has most of the parameters, before what cannot be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(160, 8), Branch()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.inner(self.embed(ids)).pow(2).mean()  # type: ignore[no-any-return]


def columns(samples: int) -> Signature:
    return (("ids", TensorMeta((samples, 4), torch.int64)),)


def test_a_price_and_a_search_name_the_module_that_leaves_too_few_segments() -> None:
    workload = Workload(GraphSource(Model()), columns, 8)
    said = r"cannot fill 4 stages \(pp=4\): inner \(Branch\) is opaque, .*test_opaque.py:\d+: `ret"
    with pytest.raises(PlanError, match=said):
        price(workload, cluster(), Candidate(pp=4, microbatch=8, num_microbatches=1))
    found = search(workload, cluster(), Pinned(pp=4))
    reasons = [own.why for own in found.rejected]
    assert not found.plans
    assert any("`return 2 * y if y.max() > 0.5 else y`" in why for why in reasons), reasons
