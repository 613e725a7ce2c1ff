"""Backwards of segments that are shared over ranks are graphs, with autograd's bits."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch

import merak
from tests.multirank.ranks import RankPool
from tests.tiers import slow
from tests.unit.engine.models import VOCABULARY, gpt2
from tests.unit.graph import tensor_parallel_cases as cases
from tests.unit.graph.expert_models import build

Step = tuple[float, dict[str, torch.Tensor]]


def steps(kind: str, degrees: dict[str, int], options: dict[str, Any]) -> tuple[list[Step], str]:
    """Losses and parameters of steps with other tokens, and why autograd runs backwards."""
    mesh = merak.init(**degrees, device="cpu")

    def batch(step: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(10 * step + mesh.dp_rank)
        ids = torch.randint(2, min(cases.VOCABULARY, VOCABULARY), (4, 8), generator=generator)
        return {"input_ids": ids, "labels": ids.clone()}

    parallel = merak.parallelize(
        gpt2(dropout=0.1) if kind == "gpt2" else build(kind),
        example_batch=batch(0),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        num_microbatches=2,
        **options,
    )
    found = []
    for step in range(3):
        loss = float(parallel.step(batch(step)))
        own = {n: p.detach().clone() for n, p in parallel.engine.parameters.items()}
        found.append((loss, own))
    programs = [p for s in parallel.engine._state.base.stages.values() for p in s.segments]
    whys = [p.joint.obstacle if p.joint else "autograd" for p in programs if p.trains]
    return found, "; ".join(filter(None, whys))


def both(
    kind: str, degrees: dict[str, int], options: dict[str, Any]
) -> tuple[tuple[list[Step], str], list[Step]]:
    """The same job with graphs, then on autograd."""
    with_graphs = steps(kind, degrees, options)
    with mock.patch("merak.graph.program.program.joint_segment", lambda *_: None):
        on_autograd, why = steps(kind, degrees, options)
    assert why
    return with_graphs, on_autograd


@pytest.mark.parametrize(
    ("kind", "degrees", "options"),
    [
        ("mixtral", {"dp": 2, "ep": 2}, {}),
        slow("gpt2", {"tp": 2}, {}),
        slow("gpt2", {"tp": 2, "pp": 2}, {"recompute": "full", "sequence_parallel": True}),
        slow("gpt_oss", {"dp": 2, "ep": 2}, {"recompute": "full"}),
        slow("deepseek_v3", {"dp": 4, "ep": 2}, {"zero": 2}),
        slow("gshard", {"dp": 2, "ep": 2}, {}),
        slow("mixtral", {"tp": 2, "ep": 2}, {}),
        slow("mixtral", {"dp": 2, "cp": 2, "ep": 4}, {}),
        slow("mixtral", {"dp": 2, "pp": 2, "ep": 2}, {"schedule": "zero_bubble_h1"}),
        slow("mixtral", {"dp": 2, "ep": 2}, {"expert_capacity": 1.0}),
    ],
)
def test_bits_are_those_of_autograd(
    pool: RankPool, kind: str, degrees: dict[str, int], options: dict[str, Any]
) -> None:
    num_ranks = math.prod(degrees.get(axis, 1) for axis in ("dp", "tp", "pp", "cp"))
    for (ours, why), theirs in pool.run(both, num_ranks, kind, degrees, options):
        assert why == ""
        for (loss, own), (other_loss, other) in zip(ours, theirs, strict=True):
            assert loss == other_loss
            assert own.keys() == other.keys()
            assert all(torch.equal(value, other[name]) for name, value in own.items())
