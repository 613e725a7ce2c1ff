"""Plans of models that take values from other replicas: graphs and prices by their number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as with_gradients
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from merak.core import mesh as meshes
from merak.core.elastic import GivenDegrees
from merak.core.mesh import Mesh
from merak.core.tensor_meta import Signature, TensorMeta
from merak.graph.ir.replicas import REPLICA_ROWS
from merak.graph.segment.build import GraphSource
from merak.plan.cluster.cluster import Cluster, Link
from merak.plan.cluster.collectives import collective_seconds
from merak.plan.cluster.groups import group_of
from merak.plan.price.candidate import Candidate
from merak.plan.price.segments import SegmentPrice, price_segments
from merak.plan.price.workload import Workload
from merak.plan.search.held import HeldEstimates
from merak.plan.search.pinned import Pinned
from merak.plan.search.search import search
from tests.unit.plan.price.test_step import cluster

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")

WIDTH, RANKS = 64, 4
SLOW = Link("slow", 1e-5, 1e9)


@pytest.fixture(autouse=True)
def job() -> Iterator[None]:
    """Rank 0 of four whose layout a plan is to choose."""
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    meshes.set_mesh(Mesh(RANKS, 1, 1, 0, torch.device("cpu"), None, given=GivenDegrees()))
    yield
    meshes.reset()
    dist.destroy_process_group()


class Contrast(nn.Module):
    """Compares its rows with those of all replicas."""

    def __init__(self, num_ranks: int | None = None) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.num_ranks = num_ranks

    def forward(self, x: Tensor) -> Tensor:
        own = self.blocks(x)
        if self.num_ranks is not None:
            parts = [torch.zeros_like(own) for _ in range(self.num_ranks)]
            dist.all_gather(parts, own.detach())
            return (own - torch.cat(parts).mean(0)).square().mean()
        labels = torch.arange(len(own)) + len(own) * dist.get_rank()
        every = torch.cat(with_gradients.all_gather(own))
        return nn.functional.cross_entropy(own @ every.T, labels)


def columns(samples: int) -> Signature:
    return (("x", TensorMeta((samples, WIDTH), torch.float32)),)


def workload_of(model: nn.Module) -> Workload:
    return Workload(GraphSource(model), columns, 16, dp=RANKS)


def with_links(link: Link) -> Cluster:
    own = cluster(per_node=1)
    return replace(own, nodes=tuple(replace(n, link=link, network=link) for n in own.nodes))


def collectives_s(segments: tuple[SegmentPrice, ...]) -> tuple[float, float]:
    """Seconds of collectives, forward and backward."""
    passes = [(own.forward, own.backward) for own in segments]
    forward, backward = (sum(s for one in way for _, s in one.steps) for way in zip(*passes))
    return forward, backward


def test_a_plan_knows_what_is_gathered_its_time_and_its_memory() -> None:
    workload, held = workload_of(Contrast()), []
    slow = with_links(SLOW)
    for dp in (1, 2, 4):
        alone = Candidate(dp=dp, microbatch=4, num_microbatches=4)
        form = workload.form(alone)
        graph = workload.graph(4, form.dp)
        rows = [
            n.args[1] for s in graph.segments for n in s.graph.nodes if n.target == REPLICA_ROWS
        ]
        assert rows == ([] if dp == 1 else [dp]) and form.dp == dp
        found = collectives_s(price_segments(workload, alone, slow.nodes[0].device, slow))
        size, group = dp * 4 * WIDTH * 4, group_of(slow, dp, 1)
        kinds = ("all_gather", "reduce_scatter")
        assert found == pytest.approx([collective_seconds(k, size, group) for k in kinds])
        held.append(HeldEstimates(workload, slow.nodes[0].device)(form).largest)
    # What a replica gathers more, and its scores.
    assert held[1] - held[0] >= 4 * WIDTH * 4 and held[2] - held[1] >= 2 * 4 * WIDTH * 4


def test_the_search_has_layouts_with_the_number_of_replicas_that_a_model_was_given() -> None:
    found = search(workload_of(Contrast(RANKS)), with_links(SLOW), Pinned(microbatch=1))
    assert {own.candidate.dp for own in found.priced} == {RANKS}
    assert any("gathers a list of 4 ranks" in own.why for own in found.rejected)
