"""A loss that reads the trainer's schedule and steps is that of one process on several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer

import merak
from tests.multirank.ranks import RankPool
from tests.multirank.training import Layout, Setup, alone, make_merak, make_reference
from tests.tiers import slow

SETUP = Setup(
    "gpt2",
    padded=False,
    arguments={"max_steps": 3, "learning_rate": 1e-2, "warmup_steps": 2, "weight_decay": 0.1},
)


class Weighs:
    """Weighs its terms by the learning rate, the step and the epoch."""

    def compute_loss(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, **of_step: Any
    ) -> Any:
        found = model(input_ids=inputs["input_ids"])
        labels = inputs["labels"][:, 1:].flatten()
        loss = nn.functional.cross_entropy(found.logits[:, :-1].flatten(0, 1), labels)
        rate = self.optimizer.param_groups[0]["lr"] + self.lr_scheduler.get_last_lr()[0]
        loss = loss + 10 * rate * found.logits.square().mean()
        loss = loss * (1 + self.state.global_step / self.state.max_steps)
        return (loss, found) if return_outputs else loss


class Own(Weighs, merak.MerakTrainer):
    """In a job."""


class Their(Weighs, Trainer):
    """In one process."""


def losses(trainer: Any) -> list[float]:
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def train(layout: Layout, cache: str) -> list[float]:
    dp, tp, pp = layout
    merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    return losses(make_merak(SETUP, dp, cache, trainer_class=Own))


@pytest.mark.parametrize("layout", [(1, 1, 2), slow((1, 2, 1))])
def test_every_step_has_its_own(pool: RankPool, cache: str, layout: Layout) -> None:
    with alone():
        expected = losses(make_reference(SETUP, trainer_class=Their))
    assert len(expected) == 3
    for found in pool.run(train, 2, layout, cache):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
