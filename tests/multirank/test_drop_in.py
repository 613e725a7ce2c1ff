"""Optimizers and losses of a script's own, as transformers steps and computes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

from tests.multirank.ranks import RankPool
from tests.multirank.training import Layout, Setup, Texts, alone, make_merak, make_reference
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


class OwnLoss:
    """A loss of the logits, with a weight that grows, and a penalty."""

    weight = 1.0

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
        scale = 40.0 if num_items_in_batch is None else num_items_in_batch
        loss = self.weight * loss / scale + 1e-3 * outputs.logits.square().mean()
        return (loss, outputs) if return_outputs else loss


class Growing(TrainerCallback):
    """Makes the weight of a trainer's loss grow."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.weight += 0.5


def grown(trainer: Any) -> tuple[list[float], float]:
    """Losses of training and of an evaluation behind it."""
    trainer.add_callback(Growing(trainer))
    return losses(trainer), trainer.evaluate(Texts(6))["eval_loss"]


def train_with_own_loss(layout: Layout, cache: str) -> tuple[list[float], float]:
    import merak

    dp, tp, pp = layout
    merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    made = type("OwnLoss", (OwnLoss, merak.MerakTrainer), {})
    return grown(make_merak(SETUP, dp, cache, trainer_class=made))


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
    [((2, 1, 1), 1), slow((1, 2, 1), 0)],
)
def test_own_rates_are_trained_with(pool: RankPool, cache: str, layout: Layout, zero: int) -> None:
    with alone():
        made = type("OwnRates", (OwnRates, Trainer), {})
        reference = losses(make_reference(SETUP, trainer_class=made))
        assert abs(losses(make_reference(SETUP))[-1] - reference[-1]) > 1e-3  # the rates matter
    for found in pool.run(train, 2, layout, zero, cache):
        torch.testing.assert_close(found, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", [(1, 1, 2), slow((1, 2, 1))])
def test_own_losses_are_traced_with_the_model(pool: RankPool, cache: str, layout: Layout) -> None:
    with alone():
        made = type("OwnLoss", (OwnLoss, Trainer), {})
        reference, evaluated = grown(make_reference(SETUP, trainer_class=made))
    for found, own in pool.run(train_with_own_loss, 2, layout, cache):
        torch.testing.assert_close(found, reference, rtol=1e-4, atol=1e-5)
        assert own == pytest.approx(evaluated, rel=1e-4)


class OwnMean:
    """A loss that is a mean of its samples, and takes no notice of the step's label tokens."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        loss = outputs.logits.square().mean()
        return (loss, outputs) if return_outputs else loss


def gradients_of_mean(trainer: Any) -> list[float]:
    trainer.train()
    return [float(log["grad_norm"]) for log in trainer.state.log_history if "grad_norm" in log]


def train_with_mean(layout: Layout, cache: str) -> list[float]:
    import merak

    dp, tp, pp = layout
    merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    given = {"max_steps": 1, "per_device_train_batch_size": 4 // dp}
    setup = Setup("gpt2", num_microbatches=dp, num_samples=8, padded=False, arguments=given)
    made = type("OwnMean", (OwnMean, merak.MerakTrainer), {})
    return gradients_of_mean(make_merak(setup, dp, cache, trainer_class=made))


@pytest.mark.parametrize("layout", [(2, 1, 1)])
def test_a_mean_of_ones_own_is_averaged_over_replicas(
    pool: RankPool, cache: str, layout: Layout
) -> None:
    setup = Setup(
        "gpt2", num_microbatches=1, num_samples=8, padded=False, arguments={"max_steps": 1}
    )
    with alone():
        made = type("OwnMean", (OwnMean, Trainer), {})
        expected = gradients_of_mean(make_reference(setup, trainer_class=made))
    for found in pool.run(train_with_mean, 2, layout, cache):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def train_with_noise(layout: Layout, alpha: float | None) -> tuple[list[float], float]:
    """Losses of three steps on the same samples, without learning, and of an evaluation."""
    import merak

    dp, tp, pp = layout
    merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    given = {"max_steps": 3, "learning_rate": 0.0, "neftune_noise_alpha": alpha}
    setup = Setup("gpt2", num_microbatches=2, num_samples=8, padded=False, arguments=given)
    trainer = make_merak(setup, dp, "", train_dataset=Texts(8, padded=False))
    return losses(trainer), trainer.evaluate(Texts(6))["eval_loss"]


@pytest.mark.parametrize("layout", [slow((1, 2, 1)), slow((2, 1, 1))])
def test_noise_of_embeddings_is_the_same_in_every_layout(pool: RankPool, layout: Layout) -> None:
    [(plain, evaluated)] = pool.run(train_with_noise, 1, (1, 1, 1), None)
    [(noisy, own)] = pool.run(train_with_noise, 1, (1, 1, 1), 5.0)
    assert len({round(loss, 4) for loss in plain}) == 1  # every step has all samples
    assert len({round(loss, 4) for loss in noisy}) == 3  # and noise of its own
    assert own == pytest.approx(evaluated, rel=1e-5)
    for found, own in pool.run(train_with_noise, 2, layout, 5.0):
        torch.testing.assert_close(found, noisy, rtol=1e-4, atol=1e-5)
        assert own == pytest.approx(evaluated, rel=1e-4)
