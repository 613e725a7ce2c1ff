"""What replicas exchange is priced in the buckets that the engine fills."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from merak.core.tensor_meta import TensorMeta
from merak.engine.comm.gradient_buckets import fill_buckets
from merak.plan.options import BUCKET_BYTES
from merak.plan.price.replicas import _buckets


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
