from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from merak.core.errors import TrainingError
from merak.engine.step.loss_scale import LossScale
from merak.engine.step.optimizer_step import FiniteCheck, StepNumbers
from merak.trainer.health.evaluated import FiniteLosses
from merak.trainer.health.not_finite import PERSISTENT_OVERFLOWS, SkippedSteps

NAN, INF = math.nan, math.inf


def arguments(policy: str = "skip", most: int = 2) -> Any:
    return SimpleNamespace(nan_policy=policy, max_skipped_steps=most, should_log=False)


def skips(skipped: SkippedSteps, args: Any, loss: float, norm: float | None = None) -> bool:
    losses = torch.tensor([1.0, loss])
    return skipped.skips(args, 7, numbers(skipped, loss if norm is None else norm, losses))


def numbers(skipped: SkippedSteps, norm: float, losses: torch.Tensor) -> StepNumbers:
    return skipped.check.end(torch.tensor(norm), losses).read()


def logged(skipped: SkippedSteps, loss: float) -> float:
    logs = {"loss": loss}
    skipped.logged(logs)
    return logs["loss"]


def test_more_skips_in_a_row_than_are_allowed_end_the_job() -> None:
    skipped, args = SkippedSteps(FiniteCheck(None)), arguments()
    assert [skips(skipped, args, x) for x in (NAN, INF, 1.0, NAN, NAN)] == [1, 1, 0, 1, 1]
    with pytest.raises(TrainingError) as caught:
        skips(skipped, args, NAN)
    assert str(caught.value) == (
        "step 7 has loss nan and gradient norm nan, and the 2 steps before it were skipped too, so "
        "the model has diverged; go on from an earlier checkpoint with a lower learning rate, look "
        "at the data, or raise max_skipped_steps=2."
    )


def test_a_policy_of_stopping_stops_at_once() -> None:
    with pytest.raises(TrainingError, match="or leave such steps out with nan_policy='skip'"):
        skips(SkippedSteps(FiniteCheck(None)), arguments("stop"), NAN)


@pytest.mark.parametrize("policy,most", [("stop", 0), ("skip", 0), ("skip", 3)])
def test_overflows_of_a_high_loss_scale_are_not_counted(policy: str, most: int) -> None:
    scaler = LossScale()
    skipped, args = SkippedSteps(FiniteCheck(scaler)), arguments(policy, most)
    for _ in range(16):  # as at the start of fp16: 65536 is too high
        assert skips(skipped, args, 1.0, INF)
    assert scaler.get_scale() == 1.0
    for _ in range(most):
        assert skips(skipped, args, 1.0, INF)
    with pytest.raises(TrainingError, match=r"step 7 has loss 2\.0 and gradient norm inf"):
        skips(skipped, args, 1.0, INF)


def test_a_log_shows_a_loss_that_is_not_finite_where_none_is() -> None:
    skipped, args = SkippedSteps(FiniteCheck(None)), arguments(most=9)
    assert logged(skipped, 0.5) == 0.5  # somebody's own log
    skips(skipped, args, NAN)
    assert math.isnan(logged(skipped, 0.0))
    assert math.isnan(skipped.total(0.0))
    skips(skipped, args, NAN)
    skips(skipped, args, 2.0)
    assert logged(skipped, 3.0) == 3.0  # transformers' mean of those that are finite
    assert skipped.total(NAN) == 0.0
    assert skipped.total(6.0) == 6.0
    skips(skipped, args, INF)
    assert logged(skipped, 0.0) == INF
    skipped.start()
    skips(skipped, args, NAN)
    assert math.isnan(skipped.total(0.0))


def test_a_finite_loss_whose_gradient_overflows_is_logged_as_it_is() -> None:
    skipped, args = SkippedSteps(FiniteCheck(LossScale())), arguments()
    skips(skipped, args, 1.0, INF)
    assert logged(skipped, 2.0) == 2.0


def test_where_it_began_is_said_of_failures_and_of_persistent_overflows() -> None:
    args, located = arguments("skip", 9), []

    def locate() -> str:
        located.append(1)
        return " (NaN first appeared here)"

    losses = torch.tensor([1.0])
    skipped = SkippedSteps(FiniteCheck(None))
    assert skipped.skips(args, 7, numbers(skipped, NAN, losses), locate)
    assert skipped.found == "loss 1.0 and gradient norm nan (NaN first appeared here)"
    assert not skipped.skips(args, 8, numbers(skipped, 1.0, losses), locate)
    assert len(located) == 1
    overflowing = SkippedSteps(FiniteCheck(LossScale()))
    for _ in range(PERSISTENT_OVERFLOWS - 1):
        overflowing.skips(args, 7, numbers(overflowing, INF, losses), locate)
    assert len(located) == 1
    overflowing.skips(args, 7, numbers(overflowing, INF, losses), locate)
    assert len(located) == 2
    overflowing.skips(args, 7, numbers(overflowing, INF, losses), locate)
    assert len(located) == 2


def test_an_evaluation_names_its_batches_that_are_not_finite(
    caplog: pytest.LogCaptureFixture,
) -> None:
    finite = FiniteLosses()
    for number, loss in enumerate((1.0, NAN, 2.0, INF)):
        finite.add(torch.tensor(loss), number == 3)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("the loss of 2 of 4 batches of an evaluation is not finite, so its mean")
    assert "the first is batch 1 (from 0), with nan" in said
    FiniteLosses().add(None, True)
    assert len(caplog.records) == 1
