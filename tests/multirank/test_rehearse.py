"""A rank that runs alone takes the memory that it takes among real ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from merak.data import signature
from merak.graph.segment.build import GraphSource
from merak.plan.cluster.parse import parse_cluster
from merak.plan.memory.ledger import Category
from merak.plan.price.candidate import Candidate
from merak.plan.price.workload import Workload
from merak.rehearse.rehearsal import rehearse
from tests.multirank.memory_jobs import BATCH, MODELS, MemoryJob, adam, batch_of, measure

STATIC = (Category.PARAMETERS, Category.OPTIMIZER)


@dataclass(frozen=True)
class Layout:
    degrees: tuple[int, int, int]
    options: dict[str, object] = field(default_factory=dict)


LAYOUTS = [
    Layout((1, 1, 2), {"partition": (4, 4)}),
    Layout((1, 1, 2), {"partition": (4, 4), "recompute": "full"}),
    Layout((1, 2, 1)),
    Layout((2, 1, 1)),
    Layout((2, 1, 1), {"zero": 2}),
    Layout((2, 1, 1), {"zero": 3}),
]


def rehearsed(layout: Layout, rank: int, job: MemoryJob) -> int:
    """The peak of a rehearsed rank, beyond parameters and optimizer; GPT-2 has no buffers."""
    dp, tp, pp = layout.degrees
    model = MODELS[job.family](job.dropout)
    sample = signature(batch_of(job.family)).columns
    workload = Workload(GraphSource(model), lambda _: sample, BATCH, optimizer=adam)
    count = job.num_microbatches
    options = {"recompute": None, **layout.options}
    candidate = Candidate(dp=dp, tp=tp, pp=pp, microbatch=BATCH, num_microbatches=count, **options)
    batch = {n: torch.cat([c] * count) for n, c in batch_of(job.family).items()}
    cluster = parse_cluster("h100:2")
    found = rehearse(workload, cluster, candidate, rank, batch, device=torch.device("cpu"), steps=1)
    return found.peak_bytes - sum(found.memory.peak.by_category.get(c, 0) for c in STATIC)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_rehearsed_rank_has_the_peak_of_a_real_one(pool, tmp_path, layout):
    job = MemoryJob("gpt2", 0.1, options=layout.options)
    ranks = pool.run(measure, 2, layout.degrees, [job], tmp_path)
    for rank, (real,) in enumerate(ranks):
        assert rehearsed(layout, rank, job) == real.measured, rank
