"""The end of a step: which steps are not finite, and whose fault that is."""

from __future__ import annotations

import math

import torch

from merak.engine.optimizer.connection import connect_optimizer
from merak.engine.step.loss_scale import LossScale
from merak.engine.step.optimizer_step import FiniteCheck

ONE = torch.ones(())


def test_overflows_at_a_scale_that_cannot_be_the_reason_are_counted() -> None:
    check = FiniteCheck(LossScale(init_scale=4.0))
    seen = []
    for norm in (math.inf, math.nan, math.inf, math.inf, 1.0, math.inf):
        assert check.fails(check.end(torch.tensor(norm), ONE).read()) is (norm != 1.0)
        seen.append((check.is_overflow, check.num_failed))
    assert seen == [(True, 0), (True, 0), (False, 1), (False, 2), (False, 0), (False, 1)]


def test_without_a_loss_scale_every_step_that_is_not_finite_is_counted() -> None:
    check, losses = FiniteCheck(None), torch.tensor([1.0, math.nan])
    ends = [check.end(*found) for found in ((ONE, ONE), (ONE, losses), (ONE * math.inf, ONE))]
    assert [float(end.non_finite) for end in ends] == [0, 1, 1]
    assert [bool(end.has_finite_loss) for end in ends] == [1, 0, 1]
    assert [check.fails(end.read()) for end in ends] == [0, 1, 1]
    assert check.num_failed == 2 and not check.is_overflow


def test_every_step_of_an_optimizer_reaches_the_model() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer, seen = torch.optim.SGD([weight], lr=1.0), []
    connect_optimizer(optimizer, lambda: seen.append(weight.detach().clone()))
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # which wraps the step as well
    weight.grad = torch.ones(2)
    optimizer.step()
    assert len(seen) == 1 and torch.equal(seen[0], torch.zeros(2))
