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
from merak.plan.memory.zero import ZeroSharding
from merak.plan.options import BUCKET_BYTES, ParallelOptions
from merak.plan.price.candidate import Candidate
from merak.plan.price.replicas import _buckets, _Exchanges, zero_groups


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
