"""What replicas exchange is priced in the buckets that the engine fills."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from merak.core.tensor_meta import TensorMeta
from merak.engine.comm.gradient_buckets import fill_buckets
from merak.plan.cluster.collectives import collective_seconds
from merak.plan.cluster.groups import group_of
from merak.plan.cluster.parse import parse_cluster
from merak.plan.cost.calibration import PassSeconds
from merak.plan.memory.zero import ZeroSharding
from merak.plan.options import BUCKET_BYTES, ParallelOptions
from merak.plan.price.candidate import Candidate
from merak.plan.price.replicas import (
    StageExchange,
    _buckets,
    _Exchanges,
    beside_s,
    exposed_gather_s,
    stage_exchange,
    zero_groups,
)
from merak.schedule import registry


@pytest.mark.parametrize("seed", range(8))
def test_buckets_are_those_of_the_engine(seed: int) -> None:
    """Parameters from small to larger than a bucket, of two types; gradients of twice the size."""
    draw = random.Random(seed)
    parameters = {
        str(number): nn.Parameter(
            torch.empty(
                int(BUCKET_BYTES * draw.choice((0.01, 0.2, 0.6, 3.0)) / 4),
                dtype=draw.choice((torch.float32, torch.float32, torch.bfloat16)),
                device="meta",
            )
        )
        for number in range(30)
    }
    metas = {
        name: TensorMeta(tuple(own.shape), own.dtype, True) for name, own in parameters.items()
    }
    sent = {name: 2 * meta.num_bytes for name, meta in metas.items()}
    filled = fill_buckets(reversed(parameters.values()), BUCKET_BYTES)
    names = {id(own): name for name, own in parameters.items()}
    assert _buckets(metas, sent) == [sum(sent[names[id(p)]] for p in own) for own in filled]


def test_nothing_is_sent_of_no_parameters() -> None:
    assert _buckets({}, {}) == []


def test_buckets_are_as_large_as_the_job_has_them() -> None:
    metas = {str(number): TensorMeta((8,), torch.float32, True) for number in range(6)}
    sent = {name: meta.num_bytes for name, meta in metas.items()}
    assert [len(_buckets(metas, sent, size)) for size in (1, 33, 64, 10_000)] == [6, 3, 3, 1]


def test_groups_that_shard_are_priced_by_the_links_of_both_collectives() -> None:
    cluster = parse_cluster("h100:8x2")
    layouts = [Candidate(dp=16, zero=3, zero_group_size=size) for size in (0, 8, 16)]
    metas = {"weight": TensorMeta((4096, 1024), torch.float32, True)}
    sent = {"weight": metas["weight"].num_bytes}
    stage: Any = SimpleNamespace(parameters=metas)
    kernels = SimpleNamespace(copies_buckets=False)
    workload: Any = SimpleNamespace(common=ParallelOptions(), kernels=kernels)
    every = [_Exchanges(stage, (0,), cluster, own, ZeroSharding(16), workload) for own in layouts]
    inside, between = group_of(cluster, 8, 1), group_of(cluster, 2, 8)
    assert (inside.num_nodes, between.num_nodes, between.size) == (1, 2, 2)
    assert [zero_groups(cluster, own) for own in layouts] == [None, (inside, between), None]
    num_bytes = sent["weight"]
    gather, reduce = (
        [own.seconds(kind, metas, sent) for own in every]
        for kind in ("all_gather", "reduce_scatter")
    )
    assert gather[1] == collective_seconds("all_gather", num_bytes, inside) < gather[0]
    assert reduce[1] == pytest.approx(
        collective_seconds("reduce_scatter", num_bytes, inside)
        + collective_seconds("all_reduce", num_bytes // 8, between)
    )
    assert (gather[2], reduce[2]) == (gather[0], reduce[0])


def _exchange(zero: int, bucket_bytes: int) -> StageExchange:
    """What a stage of eight equal parameters exchanges, whose backward takes 4 ms."""
    candidate = Candidate(dp=2, zero=zero, num_microbatches=4)
    metas = {str(number): TensorMeta((2**18,), torch.float32, True) for number in range(8)}
    stage: Any = SimpleNamespace(parameters=metas, whole=PassSeconds(2e-3, 0.0, 4e-3, 2e-3, 2e-3))
    kernels = SimpleNamespace(copies_buckets=False)
    common = ParallelOptions(bucket_bytes=bucket_bytes)
    workload: Any = SimpleNamespace(common=common, kernels=kernels)
    sharding = ZeroSharding(degree=2 if zero else 1, gradients=zero == 2)
    schedule = registry.build("1f1b", 1, 4)
    cluster = parse_cluster("rtx3090:2")
    return stage_exchange(stage, 0, cluster, candidate, schedule, sharding, workload)


@pytest.mark.parametrize("bucket_bytes", [2**20, 2**25])
def test_behind_the_last_backward_zero_1_and_2_wait_for_the_same(bucket_bytes: int) -> None:
    """Zero 2 also reduces behind each one before it, which the next one hides."""
    first, second = _exchange(1, bucket_bytes), _exchange(2, bucket_bytes)
    assert (first.passes.backward_s, first.num_gathers) == (
        0.0,
        2**25 // 4 // min(bucket_bytes, 2**23),
    )
    assert second.passes.backward_s > 0.0
    assert first.reduction_s == pytest.approx(second.passes.backward_s + second.reduction_s)


def test_one_bucket_is_hidden_by_the_next_backward_and_not_by_its_own() -> None:
    one, many = _exchange(2, 2**25), _exchange(2, 2**20)
    assert one.passes.backward_s == beside_s(4e-3, one.unhidden_reduction_s)
    assert one.passes.backward_s + one.reduction_s == one.unhidden_reduction_s
    assert many.passes.backward_s + many.reduction_s < many.unhidden_reduction_s


def test_what_a_forward_reads_first_comes_with_the_first_gather() -> None:
    stages: Any = [SimpleNamespace(whole=SimpleNamespace(forward_s=3.0)) for _ in range(2)]
    nothing = PassSeconds(0.0, 0.0, 0.0, 0.0, 0.0)

    def exposed_s(*num_gathers: int) -> float:
        exchanges = [StageExchange(0.0, nothing, 2.0, num, interference=0.0) for num in num_gathers]
        return exposed_gather_s(stages[: len(num_gathers)], exchanges)

    assert exposed_s(1) == 2.0  # the whole one
    assert exposed_s(4) == 0.5  # a quarter
    assert exposed_s(4, 1) == 0.5  # hidden by the stage before
