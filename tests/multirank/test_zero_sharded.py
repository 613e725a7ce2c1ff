"""Replicas that hold shares of the parameters themselves, gathered segment by segment."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import merak
from merak.core.errors import ScheduleError
from tests.multirank.ranks import RankPool
from tests.multirank.test_parallelize import Classifier
from tests.multirank.test_zero import make, share
from tests.multirank.training import Layout
from tests.tiers import slow
from tests.unit.graph.tensor_parallel_cases import assert_gradients_equal

STEPS = 3


class WeightNormed(Classifier):
    """Of whose weights some are computed, as their gradients are."""

    def __init__(self) -> None:
        super().__init__()
        for block in (self.narrow, self.again):
            nn.utils.parametrizations.weight_norm(block[2])


def train(layout: Layout, name: str, settings: list[dict[str, Any]]) -> list[Any]:
    """Per setting: losses of training and evaluation, and parameters, whole."""
    dp, tp, pp = layout
    merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    dtype = getattr(torch, name)
    results = []
    for options in settings:
        parallel = make(layout, dtype, **options)
        losses = [parallel.step(share(step, dtype)).item() for step in range(STEPS)]
        losses.append(parallel.evaluate(share(9, dtype)).item())
        stages = parallel.engine._state.base.stages.values()
        for segment in (segment for stage in stages for segment in stage.segments):
            assert not segment.trains or (segment.joint and not segment.joint.obstacle)
        kept = sum(p.nbytes for p in parallel.engine.parameters.values() if not p.is_meta)
        with parallel.engine.whole_model():
            found = dict(parallel.model.named_parameters())
            final = {n: found[n].detach().clone() for n in parallel.engine.parameters}
        results.append((losses, final, kept))
    return results


@pytest.mark.nccl_rules
@pytest.mark.parametrize("layout", [(2, 1, 2), slow((2, 2, 1))])
def test_shares_of_parameters_train_as_whole_ones(pool: RankPool, layout: Layout) -> None:
    settings: list[dict[str, Any]] = [{}, {"zero": 3}, {"zero": 3, "recompute": "full"}]
    if layout[2] > 1:  # gradients of weights are made later, and some wait for them
        settings += [{"zero": 3, "schedule": "zero_bubble_h1"}]
        settings += [{"zero": zero, "schedule": "zero_bubble_v"} for zero in (0, 3)]
        normed = {"schedule": "zero_bubble_h1", "model": WeightNormed}
        settings += [{**normed, "zero": zero} for zero in (0, 3)]
    for rank in pool.run(train, 4, layout, "float32", settings):
        for options, (losses, parameters, kept) in zip(settings, rank, strict=True):
            # Of the same stages, whole.
            expected_losses, expected, whole = next(
                r for r in rank if r[1].keys() == parameters.keys()
            )
            assert losses == pytest.approx(expected_losses, rel=1e-5)
            assert_gradients_equal(parameters, expected)  # the parameters, to its tolerance
            # Also of what several segments read.
            assert whole > 0 and kept == (0 if options.get("zero") == 3 else whole)


@pytest.mark.slow
def test_shares_are_masters(pool: RankPool) -> None:
    settings = [{"master_weights": True, "zero": zero} for zero in (2, 3)]
    for (losses, expected, _), (found, parameters, _) in pool.run(
        train, 4, (2, 1, 2), "bfloat16", settings
    ):
        assert found == pytest.approx(losses, rel=2**-7)
        for name, value in expected.items():
            assert parameters[name].dtype == torch.bfloat16
            torch.testing.assert_close(parameters[name], value, rtol=2**-6, atol=1e-4)


def refused(name: str, options: dict[str, Any]) -> str:
    merak.init(dp=2, device="cpu")
    try:
        make((2, 1, 1), getattr(torch, name), zero=3, **options)
    except ScheduleError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("float32", {"sub_pipelining": "on"}, "runs sub-microbatches of several; use zero=2"),
        ("bfloat16", {}, "set master_weights=True and leave gradient_sums='float32'"),
    ],
)
def test_what_cannot_be_gathered_is_refused(
    pool: RankPool, name: str, options: dict[str, Any], sentence: str
) -> None:
    for said in pool.run(refused, 2, name, options):
        assert sentence in said
