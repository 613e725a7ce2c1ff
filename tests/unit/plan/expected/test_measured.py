"""A cluster corrected by measured times prices the measured layout as it was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from merak.plan.expected.measured import RankTimes, measured_cluster, slowness_of
from merak.plan.price.candidate import Candidate
from merak.plan.price.step import StepParts, price, step_parts
from merak.plan.price.workload import Workload
from merak.plan.search.pinned import Pinned
from merak.plan.search.search import search
from merak.zoo.workload import example_workload
from tests.unit.plan.price.test_step import LLAMA, adam, cluster

REPLICAS = Candidate(dp=2, microbatch=4, num_microbatches=4)
PIPELINE = Candidate(pp=2, microbatch=4, num_microbatches=8)
CLUSTER = cluster(count=1)


@pytest.fixture(scope="module")
def llama() -> Workload:
    return example_workload(LLAMA, global_batch=32, sequence=16, optimizer=adam)


def times(candidate: Candidate, parts: StepParts, factors: tuple[float, ...]) -> list[RankTimes]:
    """What ranks measure whose segments and updates take so many times their price."""
    found = []
    for rank, factor in enumerate(factors):
        own = rank // candidate.stage_ranks
        exchange = parts.exchanges[own]
        found.append(
            RankTimes(
                1.0,
                busy_s=factor * parts.busy_s[own],
                reduction_s=0.0 if exchange is None else exchange.reduction_s,
                update_s=factor * parts.updates_s[own],
                transfers_s={
                    n: own.link.latency_s + own.num_bytes / own.link.bandwidth_bytes_per_s
                    for n, own in enumerate(parts.boundaries)
                },
            )
        )
    return found


@pytest.mark.parametrize("candidate", [REPLICAS, PIPELINE], ids=["dp", "pp"])
def test_what_is_measured_as_priced_leaves_the_price(llama: Workload, candidate: Candidate) -> None:
    parts = step_parts(llama, CLUSTER, candidate)
    slowness = slowness_of(CLUSTER, candidate, parts, times(candidate, parts, (1.0, 1.0)))
    corrected = measured_cluster(CLUSTER, parts, slowness)
    assert not corrected.measured
    before, after = (price(llama, own, candidate).step_s for own in (CLUSTER, corrected))
    assert after == pytest.approx(before)


@pytest.mark.parametrize("candidate", [REPLICAS, PIPELINE], ids=["dp", "pp"])
def test_a_slow_rank_is_priced_as_slow_as_it_was(llama: Workload, candidate: Candidate) -> None:
    candidate = price(llama, CLUSTER, candidate).candidate  # with its partition, which stays
    parts = step_parts(llama, CLUSTER, candidate)
    slowness = slowness_of(CLUSTER, candidate, parts, times(candidate, parts, (2.0, 6.0)))
    assert slowness.computation == pytest.approx((2.0, 6.0))
    corrected = measured_cluster(CLUSTER, parts, slowness)
    busy = step_parts(llama, corrected, candidate).busy_s
    factors = [own / before for own, before in zip(busy, parts.busy_s, strict=True)]
    wanted = [6.0] if candidate.pp == 1 else [2.0, 6.0]  # of replicas, the slowest counts
    assert factors == pytest.approx(wanted, rel=0.03)  # devices that differ by less are equal


def test_a_stage_on_several_ranks_is_priced_on_each_of_them(llama: Workload) -> None:
    parts = step_parts(llama, CLUSTER, PIPELINE)
    slowness = slowness_of(CLUSTER, PIPELINE, parts, times(PIPELINE, parts, (1.0, 6.0)))
    corrected = measured_cluster(CLUSTER, parts, slowness)
    chimera = replace(PIPELINE, schedule="chimera")
    whole = step_parts(llama, CLUSTER, chimera).busy_s
    assert step_parts(llama, corrected, chimera).busy_s == pytest.approx(
        [whole[0], 6.0 * whole[1]], rel=0.03
    )


def test_a_search_gives_a_slow_rank_fewer_segments(llama: Workload) -> None:
    parts = step_parts(llama, CLUSTER, REPLICAS)
    slowness = slowness_of(CLUSTER, REPLICAS, parts, times(REPLICAS, parts, (1.0, 6.0)))
    corrected = measured_cluster(CLUSTER, parts, slowness)
    best = search(llama, corrected, Pinned(microbatch=4, schedule="1f1b", tp=1), top=1).plans[0]
    assert best.candidate.partition is not None
    first, last = best.candidate.partition
    assert first > last
    assert best.step_s < price(llama, corrected, REPLICAS).step_s


def test_a_link_is_as_slow_as_it_was_measured(llama: Workload) -> None:
    parts = step_parts(llama, CLUSTER, PIPELINE)
    ranks = times(PIPELINE, parts, (1.0, 1.0))
    slow = [replace(r, transfers_s={n: 10 * s for n, s in r.transfers_s.items()}) for r in ranks]
    slowness = slowness_of(CLUSTER, PIPELINE, parts, slow)
    corrected = measured_cluster(CLUSTER, parts, slowness)
    (before,), (after,) = (step_parts(llama, c, PIPELINE).boundaries for c in (CLUSTER, corrected))
    seconds = [
        b.link.latency_s + b.num_bytes / b.link.bandwidth_bytes_per_s for b in (before, after)
    ]
    assert seconds[1] == pytest.approx(10 * seconds[0])


def test_reductions_that_show_more_than_priced_slow_their_link_down(llama: Workload) -> None:
    parts = step_parts(llama, CLUSTER, REPLICAS)
    (exchange,) = parts.exchanges
    assert exchange is not None
    # The rank that waits for the other one says nothing about the link.
    waits, comes_last = times(REPLICAS, parts, (1.0, 1.0))
    whole_s = exchange.unhidden_reduction_s
    hidden_s = whole_s - exchange.reduction_s
    found = [
        replace(waits, reduction_s=9.0),
        replace(comes_last, reduction_s=3 * whole_s - hidden_s),
    ]
    slowness = slowness_of(CLUSTER, REPLICAS, parts, found)
    assert dict(slowness.reductions) == pytest.approx({False: 3.0})
    corrected = measured_cluster(CLUSTER, parts, slowness)
    assert corrected.nodes[0].link.bytes_per_s == pytest.approx(
        CLUSTER.nodes[0].link.bytes_per_s / 3
    )
