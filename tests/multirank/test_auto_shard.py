"""Splits derived from the graph, on real ranks: every gradient equals that of one process."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

import merak
from merak.check import Case, CheckOptions, CheckReport, Layout, check_model
from merak.core.shards import take
from merak.graph.tensor_parallel.apply import tensor_parallel
from tests.multirank.check_on import launcher
from tests.multirank.ranks import RankPool
from tests.tiers import slow
from tests.unit.graph import expert_models
from tests.unit.graph import tensor_parallel_cases as cases
from tests.unit.graph.architectures import ARCHITECTURES

EXPERTS = ("mixtral", "deepseek_v3", "gpt_oss")
"""Partial sums of experts and of latent attention, reduced behind the combine."""

FEW_KV_HEADS = {"num_key_value_heads": 2}
AT_FOUR: list[tuple[str, dict[str, Any]]] = [
    ("llama", FEW_KV_HEADS),
    ("phi3", FEW_KV_HEADS),
    ("falcon", {}),
    ("swin", {}),
]


def gradients_off(models: list[tuple[str, dict[str, Any]]], tp: int) -> dict[str, str]:
    """By architecture, where this rank's gradients are not its share of one process's."""
    rank = merak.init(tp=tp, device="cpu").tp_rank
    problems = {}
    for name, changes in models:
        model, columns = ARCHITECTURES[name].build(**changes), ARCHITECTURES[name].batch()
        graph = cases.traced(model, columns)
        others = {**cases.buffers(model, graph), **columns}
        alone = cases.local(cases.weights(model), {}, 0)
        loss = cases.run_model(graph, alone, others)
        loss.backward()
        split, shards = cases.shard_model(graph, tensor_parallel(graph, None, tp).weights, tp)
        shares = cases.local(cases.weights(model), shards, rank)
        own_loss = cases.run_model(split, shares, others)
        own_loss.backward()
        whole = {n: t.grad for n, t in alone.items() if t.grad is not None}
        expected = {n: take(g, shards[n], rank) if n in shards else g for n, g in whole.items()}
        found = {n: shares[n].grad for n in expected}
        try:
            assert math.isclose(own_loss.item(), loss.item(), rel_tol=1e-5)
            cases.assert_gradients_equal(found, expected)
        except AssertionError as error:
            problems[name] = str(error)
    return problems


@pytest.mark.parametrize(
    "tp,models", [slow(2, [(name, {}) for name in ARCHITECTURES]), slow(4, AT_FOUR)]
)
def test_every_gradient_of_every_architecture(
    pool: RankPool, tp: int, models: list[tuple[str, dict[str, Any]]]
) -> None:
    assert pool.run(gradients_off, tp, models, tp) == [{}] * tp


def build(name: str) -> torch.nn.Module:
    is_own = name in (*EXPERTS, "separate", "all_called")
    return expert_models.build(name) if is_own else ARCHITECTURES[name].build()


def draw(step: int, samples: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, 40, (samples, 8), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids.clone()}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("falcon", Layout(tp=2, pp=2)),
        slow("t5", Layout(tp=2, pp=2)),
        *(slow(name, Layout(tp=2, pp=2)) for name in EXPERTS),
        slow("deepseek_v3", Layout(tp=2, pp=2, ep=2)),
        slow("gpt_oss", Layout(dp=2, tp=2, ep=2)),
    ],
)
def test_together_with_a_pipeline_and_clipping(pool: RankPool, name: str, layout: Layout) -> None:
    """Falcon's fused key and value are whole beside split queries, and count once in the norm."""
    assert checked(pool, name, layout).tp_sharded_fraction > 0.9


@pytest.mark.parametrize("name", [slow("separate"), slow("all_called")])
def test_experts_of_ranks_that_share_tokens(pool: RankPool, name: str) -> None:
    checked(pool, name, Layout(tp=2, ep=2, cp=2))


def checked(pool: RankPool, name: str, layout: Layout) -> CheckReport:
    """The report of a check that has passed."""

    case = Case(name, partial(build, name), draw)
    report = check_model(case, layout, CheckOptions(steps=2), launch=launcher(pool))
    assert (report.ok, report.reason) == (True, None)
    return report
