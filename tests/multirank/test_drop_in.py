"""Optimizers of a script's own over the model's parameters, as transformers steps them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Trainer

from tests.multirank.ranks import RankPool
from tests.multirank.training import Layout, Setup, alone, make_merak, make_reference
from tests.tiers import slow

SETUP = Setup("gpt2", arguments={"max_steps": 4})


class OwnRates:
    """A learning rate for each half of the model."""

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        named = list(self.model.named_parameters())  # type: ignore[attr-defined]
        halves = [[p for n, p in named if ("mlp" in n) == is_mlp] for is_mlp in (True, False)]
        groups = [{"params": half, "lr": lr} for half, lr in zip(halves, (1e-2, 1e-3), strict=True)]
        self.optimizer = torch.optim.AdamW(groups)
        return self.optimizer


def losses(trainer: Trainer) -> list[float]:
    trainer.train()
    return [float(log["loss"]) for log in trainer.state.log_history if "loss" in log]


def train(layout: Layout, zero: int, cache: str) -> list[float]:
    import merak

    dp, tp, pp = layout
    merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    setup = Setup("gpt2", arguments={**SETUP.arguments, "zero": zero})
    made = type("OwnRates", (OwnRates, merak.MerakTrainer), {})
    return losses(make_merak(setup, dp, cache, trainer_class=made))


@pytest.mark.parametrize(
    ("layout", "zero"),
    [((2, 1, 1), 1), slow((2, 1, 1), 3), slow((1, 2, 1), 0), slow((1, 1, 2), 0)],
)
def test_own_rates_are_trained_with(pool: RankPool, cache: str, layout: Layout, zero: int) -> None:
    with alone():
        made = type("OwnRates", (OwnRates, Trainer), {})
        reference = losses(make_reference(SETUP, trainer_class=made))
        assert abs(losses(make_reference(SETUP))[-1] - reference[-1]) > 1e-3  # the rates matter
    for found in pool.run(train, 2, layout, zero, cache):
        torch.testing.assert_close(found, reference, rtol=1e-4, atol=1e-5)
