"""Weights that only some ranks hold whole: steps under ZeRO, and checkpoints in other layouts.

Whole experts, and heads that the ranks do not divide, of which several have the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import merak
from tests import optimizers
from tests.multirank.ranks import RankPool
from tests.multirank.test_parallelize import adamw
from tests.tiers import slow
from tests.unit.graph.expert_models import build
from tests.unit.graph.tensor_parallel.test_shared_shards import model

Layout = tuple[int, int, int, int]
"""(dp, tp, pp, ep)."""

HEADS = {
    "few_heads": lambda: model("Qwen2", 2),
    "six_heads": lambda: model("Qwen2", 2, num_attention_heads=6),
}


def lamb(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return optimizers.Lamb(parameters, lr=1e-2)


def losses(
    layout: Layout, zero: int, steps: range, folder: str, kind: str, make: Any = adamw
) -> list[float]:
    """Train, from a checkpoint if the first step is not 0; save after the last one."""
    dp, tp, pp, ep = layout
    mesh = merak.init(dp=dp, tp=tp, pp=pp, ep=ep, device="cpu")

    def own(step: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(2, 40, (8, 8), generator=torch.Generator().manual_seed(step))
        part = ids.chunk(dp)[mesh.dp_rank]
        return {"input_ids": part, "labels": part.clone()}

    parallel = merak.parallelize(
        HEADS[kind]() if kind in HEADS else build(kind),
        example_batch=own(0),
        optimizer=make,
        num_microbatches=2,
        zero=zero,
        max_grad_norm=0.5,
    )
    if steps.start:
        parallel.load_checkpoint(folder)
    found = [float(parallel.step(own(step))) for step in steps]
    parallel.save_checkpoint(folder, {})
    streamed = {name: tensor.clone() for name, tensor in parallel.stream_weights(rank=None)}
    whole = parallel.gather_state_dict()  # on rank 0
    assert streamed.keys() == parallel.model.state_dict().keys() == (whole or streamed).keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(streamed[name], tensor, rtol=0, atol=0)
    assert not any(map(torch.isnan, [tensor.sum() for tensor in streamed.values()]))
    return found


@pytest.mark.nccl_rules
@pytest.mark.parametrize(
    ("kind", "first", "then", "zero"),
    [
        slow("mixtral", (2, 2, 1, 2), (1, 1, 2, 1), 1),
        slow("mixtral", (2, 2, 1, 2), (2, 2, 1, 1), 3),
        ("mixtral", (2, 1, 1, 2), (2, 1, 1, 1), 2),
        slow("separate", (2, 1, 1, 2), (1, 2, 1, 2), 2),
        slow("separate", (2, 2, 1, 2), (4, 1, 1, 4), 1),
        slow("all_called", (4, 1, 1, 2), (2, 1, 1, 1), 3),
        slow("few_heads", (2, 4, 1, 1), (1, 2, 2, 1), 1),
        slow("few_heads", (1, 4, 1, 1), (1, 8, 1, 1), 0),
        slow("six_heads", (1, 8, 1, 1), (2, 4, 1, 1), 3),
    ],
)
def test_checkpoints_go_on_with_weights_split_otherwise(
    pool: RankPool, tmp_path: Path, kind: str, first: Layout, then: Layout, zero: int
) -> None:
    goes_on(pool, tmp_path, kind, first, then, zero, adamw)


@pytest.mark.parametrize(
    ("kind", "first", "then", "zero"),
    [
        slow("mixtral", (2, 1, 1, 2), (1, 1, 2, 1), 0),
        slow("mixtral", (2, 1, 2, 2), (2, 2, 1, 2), 2),
        slow("separate", (4, 1, 1, 2), (1, 2, 1, 2), 1),
    ],
)
def test_whole_experts_are_stepped_by_one_rank_and_saved(
    pool: RankPool, tmp_path: Path, kind: str, first: Layout, then: Layout, zero: int
) -> None:
    goes_on(pool, tmp_path, kind, first, then, zero, lamb)


def goes_on(
    pool: RankPool, tmp_path: Path, kind: str, first: Layout, then: Layout, zero: int, make: Any
) -> None:
    def run(layout: Layout, own_zero: int, steps: range, folder: str) -> list[float]:
        dp, tp, pp, _ = layout
        where = str(tmp_path / folder)
        ranks = pool.run(losses, dp * tp * pp, layout, own_zero, steps, where, kind, make)
        found: list[float] = ranks[0]
        return found

    whole = run((1, 1, 1, 1), 0, range(4), "whole")
    started = run(first, zero if first[0] > 1 else 0, range(2), "saved")
    resumed = run(then, zero if then[0] > 1 else 0, range(2, 4), "saved")
    assert started + resumed == pytest.approx(whole, rel=1e-5)
