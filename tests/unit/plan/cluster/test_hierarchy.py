"""Levels of groups of replicas, and what hierarchical reductions cost and hold."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from merak.core.errors import ScheduleError
from merak.core.mesh import Mesh
from merak.engine.planning.reductions import is_hierarchy_faster
from merak.plan.cluster.cluster import Cluster, Link, Nodes
from merak.plan.cluster.collectives import collective_seconds
from merak.plan.cluster.groups import group_of
from merak.plan.cluster.hierarchy import (
    Hierarchy,
    hierarchical_seconds,
    hierarchy_of,
    on_nodes,
    reduction_seconds,
    replica_lines,
)
from merak.plan.engine_options import EngineOptions
from merak.plan.memory.communication_limits import level_bytes
from merak.plan.options import ParallelOptions
from merak.plan.price.candidate import Candidate
from merak.plan.price.step import memory_of, price
from merak.plan.price.workload import Workload
from merak.plan.step_plans import StepPlans
from merak.zoo.workload import example_workload
from tests.unit.plan.price.test_step import LLAMA, adam, cluster


def test_levels_of_ranks() -> None:
    assert hierarchy_of(range(4), "aabb") == Hierarchy(((0, 1), (2, 3)), ((0, 2), (1, 3)))
    assert hierarchy_of(range(4), "abba") == Hierarchy(((0, 3), (1, 2)), ((0, 1), (2, 3)))
    assert hierarchy_of((1, 3, 5, 7), "aaaabbbb") == Hierarchy(((1, 3), (5, 7)), ((1, 5), (3, 7)))


def test_nodes_with_different_numbers_have_groups_of_what_divides_both() -> None:
    found = hierarchy_of(range(6), "aaaabb")
    assert found is not None
    assert found.inside == ((0, 1), (2, 3), (4, 5))
    assert found.between == ((0, 2, 4), (1, 3, 5))


@pytest.mark.parametrize("hosts", ["", "aaaa", "abcd", "aaab"])
def test_one_level_is_none(hosts: str) -> None:
    assert hierarchy_of(range(4), hosts) is None


def mesh(dp: int, tp: int, pp: int, hosts: str = "") -> Mesh:
    return Mesh(dp, tp, pp, 0, torch.device("cpu"), None, hosts=tuple(hosts))


def test_groups_of_replicas_are_those_of_the_stages() -> None:
    one = StepPlans("1f1b", 2, 4).base.schedule
    assert replica_lines(mesh(2, 2, 2), one) == [[[0, 2], [1, 3], [4, 6], [5, 7]]]
    both = StepPlans("chimera", 2, 4).base.schedule  # whose stages are on both pp ranks
    assert replica_lines(mesh(2, 1, 2), both) == [[[0, 1, 2, 3]]]


def slow(per_node: int, count: int, network_rate: float = 1e8, latency_s: float = 1e-4) -> Cluster:
    device = cluster().nodes[0].device
    link, network = Link("fast", 1e-6, 1e12), Link("slow", latency_s, network_rate)
    return Cluster((Nodes(device, per_node, count, link, network),))


def test_a_slow_network_is_crossed_fewer_times() -> None:
    """Two nodes of 4: a ring carries 14/8 of the tensor out of a node, a hierarchy all of it."""
    group = group_of(slow(4, 2), 8, 1)
    at_once, levels = (
        f("all_reduce", 1e9, group) for f in (collective_seconds, hierarchical_seconds)
    )
    assert at_once / levels == pytest.approx(14 / 8, rel=0.05)
    assert reduction_seconds("all_reduce", 1e9, group, "auto") == levels
    assert reduction_seconds("all_reduce", 1e9, group, "off") == at_once


def test_where_there_is_one_level_the_price_is_that_of_one() -> None:
    for devices, size in ((slow(4, 1), 4), (slow(1, 4), 4)):
        group = group_of(devices, size, 1)
        assert hierarchical_seconds("all_reduce", 1e9, group) == float("inf")
        plain = collective_seconds("all_reduce", 1e9, group)
        assert reduction_seconds("all_reduce", 1e9, group, "on") == plain


@pytest.mark.parametrize("zero", [0, 1])
def test_auto_takes_the_hierarchy_where_the_network_is_slow(zero: int) -> None:
    options = EngineOptions(zero=zero, hierarchical_reductions="auto")
    model, job = nn.Linear(1000, 1000), mesh(8, 1, 1)
    assert is_hierarchy_faster(job, model, options, slow(4, 2))
    # On many nodes a ring crosses the network hardly more, and is not slower inside them.
    device = cluster().nodes[0].device
    inside, network = Link("inside", 1e-9, 4e8), Link("between", 1e-9, 1e8)
    many = Cluster((Nodes(device, 4, 16, inside, network),))
    assert not is_hierarchy_faster(mesh(64, 1, 1), model, options, many)


def workload(value: str) -> Workload:
    made = example_workload(LLAMA, global_batch=32, sequence=16, optimizer=adam)
    made.common = ParallelOptions(hierarchical_reductions=value)
    return made


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_the_price_falls_and_the_memory_counts_the_shards(zero: int) -> None:
    candidate = Candidate(dp=8, microbatch=1, num_microbatches=4, zero=zero)
    devices = slow(4, 2)
    plain, levels, auto = (
        price(workload(value), devices, candidate).step_s for value in ("off", "on", "auto")
    )
    assert levels < plain and auto == levels
    (before,), (after,) = (memory_of(workload(v), devices, candidate) for v in ("off", "on"))
    assert after.peak.total_bytes >= before.peak.total_bytes


def test_a_collective_by_hierarchy_holds_shards() -> None:
    assert level_bytes(100, is_sharded=False) == 50
    assert level_bytes(100, is_sharded=True) == 150


def test_a_plan_on_one_node_is_refused() -> None:
    candidate = Candidate(dp=4, microbatch=1, num_microbatches=8)
    with pytest.raises(ScheduleError, match="all ranks are on one node; use hierarchical_reduc"):
        price(workload("on"), slow(4, 1), candidate)
    assert price(workload("auto"), slow(4, 1), candidate).step_s > 0
    with pytest.raises(ScheduleError, match="dp=2, tp=1 and pp=2 on 2 nodes no stage has several"):
        price(workload("on"), slow(2, 2), Candidate(dp=2, pp=2, microbatch=1, num_microbatches=16))


def test_a_planned_mesh_has_the_nodes_of_its_cluster() -> None:
    assert on_nodes(mesh(4, 1, 1), slow(2, 2)).hosts == ("node 0", "node 0", "node 1", "node 1")
    assert on_nodes(mesh(2, 1, 1), slow(2, 2)).hosts == ()


def test_a_rehearsal_charges_both_levels() -> None:
    from merak.rehearse.rehearsal import rehearse
    from merak.zoo.batches.batch import example_columns
    from merak.zoo.batches.columns import draw_batch

    columns = example_columns(LLAMA.model_class, LLAMA.config, batch=4, sequence=16)
    candidate = Candidate(dp=8, microbatch=1, num_microbatches=4)
    found = {}
    for value in ("off", "on"):
        batch = draw_batch(columns, seed=0)
        cpu = torch.device("cpu")
        own = rehearse(workload(value), slow(4, 2), candidate, 0, batch, device=cpu, steps=1)
        found[value] = own.charges
    ranks = {(charge.kind, charge.ranks): charge.seconds for charge in found["on"]}
    assert {("reduce_scatter", 4), ("all_reduce", 2), ("all_gather", 4)} <= ranks.keys()
    at_once = {(charge.kind, charge.ranks): charge.seconds for charge in found["off"]}
    assert sum(ranks.values()) < sum(at_once.values())
