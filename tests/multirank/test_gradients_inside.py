"""Models that take gradients in their own forward, on real ranks: gradients as in one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from merak.check import Case, CheckOptions, Job, Layout
from tests.multirank.check_on import check_on
from tests.multirank.ranks import RankPool
from tests.tiers import slow
from tests.unit.graph import gradient_models as g

Tensors = dict[str, torch.Tensor]


class Penalty(nn.Module):
    """The penalty of a WGAN-GP, between samples without a draw."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = g.Deep()

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> Tensors:
        with torch.enable_grad():  # in evaluation, too
            between = (0.3 * x + 0.7 * other).requires_grad_()
            score = self.critic(between).sum()
            (slope,) = torch.autograd.grad(score, between, create_graph=True)
        penalty = ((slope.norm(dim=1) - 1) ** 2).mean()
        return {"loss": self.critic(other).mean() - self.critic(x).mean() + 10 * penalty}


class Potential(nn.Module):
    """An energy; its forces are what a loss function takes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = g.Deep()

    def forward(self, x: torch.Tensor) -> Tensors:
        with torch.enable_grad():
            return {"energy": self.net(x.requires_grad_()).sum(1)}


def forces_loss(outputs: Tensors, batch: Tensors) -> torch.Tensor:
    energy = outputs["energy"]
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(energy.sum(), batch["x"], create_graph=True)
    return functional.mse_loss(slope, batch["other"]) + energy.pow(2).mean()


def batch_of(columns: tuple[str, ...], step: int, samples: int) -> Tensors:
    generator = torch.Generator().manual_seed(step)
    drawn = {
        "x": torch.randn(samples, g.WIDTH, generator=generator),
        "other": torch.randn(samples, g.WIDTH, generator=generator),
        "y": torch.randint(g.CLASSES, (samples,), generator=generator),
    }
    return {name: drawn[name] for name in columns}


PAIRS, LABELLED = partial(batch_of, ("x", "other")), partial(batch_of, ("x", "y"))
FORCES = {"loss_fn": forces_loss, "loss_columns": ("other",)}


def check(pool: RankPool, case: Case, job: tuple[Layout, str]) -> None:
    layout, schedule = job
    # The others, like eager code, would need gradients to be on in evaluation.
    evaluate = layout.dp == 1 and case.build in (Penalty, Potential)
    options = CheckOptions(schedule, num_microbatches=2, steps=2, evaluate=evaluate)
    checked = Job(case, layout, options)
    report = check_on(pool, checked)
    assert report.tolerance == 1e-5
    assert not report.kept_whole
    assert report.segments > 1
    if layout.tp > 1:
        assert report.tp_sharded_fraction > 0


@pytest.mark.parametrize(
    ("layout", "schedule"),
    [
        (Layout(tp=2, pp=2), "early_recompute"),
        slow(Layout(dp=2, pp=2), "zero_bubble_h1"),
    ],
)
def test_a_penalty_on_a_gradient(pool: RankPool, layout: Layout, schedule: str) -> None:
    check(pool, Case("Penalty", Penalty, PAIRS), (layout, schedule))


@pytest.mark.parametrize("layout", [slow(Layout(pp=2)), Layout(tp=2)])
def test_a_loss_function_that_takes_a_gradient(pool: RankPool, layout: Layout) -> None:
    case = Case("Potential", Potential, PAIRS, **FORCES)
    check(pool, case, (layout, "early_recompute"))


@pytest.mark.parametrize(
    ("model", "layout"), [(g.FastAttack, Layout(pp=2)), slow(g.Balanced, Layout(tp=2))]
)
def test_attacks_and_gradients_of_parameters(
    pool: RankPool, model: type[nn.Module], layout: Layout
) -> None:
    check(pool, Case(model.__name__, model, LABELLED), (layout, "1f1b"))
