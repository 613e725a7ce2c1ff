"""What a subclass makes of a batch in the trainer's hooks is trained on, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import Trainer

from merak.core.errors import DataError
from tests.multirank.ranks import RankPool
from tests.multirank.training import (
    VOCABULARY,
    Layout,
    Setup,
    Texts,
    alone,
    make_merak,
    make_reference,
)
from tests.tiers import slow

SETUP = Setup("gpt2", arguments={"max_steps": 3, "per_device_eval_batch_size": 4})


def shifted(inputs: dict[str, Any]) -> dict[str, Any]:
    """Other tokens of the same shape, on the ranks that read them."""
    return {n: (v + 1) % VOCABULARY if n == "input_ids" else v for n, v in inputs.items()}


class ChangesInTrainingStep:
    def training_step(self, model: Any, inputs: Any, *rest: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(model, shifted(inputs), *rest)  # type: ignore[misc]
        return loss


class ChangesInPrepareInputs:
    def _prepare_inputs(self, inputs: Any) -> dict[str, Any]:
        return shifted(super()._prepare_inputs(inputs))  # type: ignore[misc]


class AddsAColumn:
    def training_step(self, model: Any, inputs: Any, *rest: Any) -> torch.Tensor:
        inputs["weights"] = torch.ones(4)
        loss: torch.Tensor = super().training_step(model, inputs, *rest)  # type: ignore[misc]
        return loss


class CutsTokens:
    def _prepare_inputs(self, inputs: Any) -> dict[str, Any]:
        return {name: column[:, :6] for name, column in inputs.items()}


class EvaluatesInACallback(Trainer):
    """A loop of one's own over an evaluation's batches, behind the evaluation."""

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        metrics = super().evaluate(*args, **kwargs)
        for batch in self.get_eval_dataloader(Texts(8, seed=3)):
            self.prediction_step(self.model, batch, prediction_loss_only=False)
        return metrics


class ChangesInPredictionStep:
    def prediction_step(self, model: Any, inputs: Any, *rest: Any, **kwargs: Any) -> Any:
        return super().prediction_step(model, shifted(inputs), *rest, **kwargs)  # type: ignore[misc]


def seen(trainer: Trainer) -> list[float]:
    """Losses of training, and the loss of an evaluation after it."""
    trainer.train()
    losses = [float(log["loss"]) for log in trainer.state.log_history if "loss" in log]
    return [*losses, trainer.evaluate(Texts(8, seed=3))["eval_loss"]]


def trainers(layout: Layout, hooks: list[type], cache: str) -> Iterator[Trainer]:
    import merak

    dp, tp, pp = layout
    merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    for hook in hooks:
        made = type(hook.__name__, (hook, merak.MerakTrainer), {})
        yield make_merak(SETUP, dp, cache, trainer_class=made)


def train(layout: Layout, hooks: list[type], cache: str) -> list[list[float]]:
    return [seen(trainer) for trainer in trainers(layout, hooks, cache)]


def refused(layout: Layout, hooks: list[type], cache: str) -> list[str]:
    said = []
    for trainer in trainers(layout, hooks, cache):
        with pytest.raises(DataError) as caught:
            seen(trainer)
        said.append(str(caught.value))
    return said


@pytest.mark.parametrize("layout", [(1, 1, 2), slow((2, 1, 1))])
def test_changed_values_are_trained_on(pool: RankPool, cache: str, layout: Layout) -> None:
    hooks = [ChangesInTrainingStep, ChangesInPrepareInputs]
    for hook, *ranks in zip(hooks, *pool.run(train, 2, layout, hooks, cache), strict=True):
        with alone():
            made = type(hook.__name__, (hook, Trainer), {})
            reference = seen(make_reference(SETUP, trainer_class=made))
        for losses in ranks:
            torch.testing.assert_close(losses, reference, rtol=1e-5, atol=1e-6)
    with alone():
        assert abs(seen(make_reference(SETUP))[0] - reference[0]) > 1e-3  # the hooks do matter


def test_other_columns_and_shapes_are_refused(pool: RankPool, cache: str) -> None:
    hooks = [AddsAColumn, CutsTokens, ChangesInPredictionStep, EvaluatesInACallback]
    for said in pool.run(refused, 2, (1, 1, 2), hooks, cache):
        assert said[0].startswith("AddsAColumn changes column 'weights' of a batch from none to ")
        assert said[1].startswith("CutsTokens changes column ")
        assert "change names, shapes and types in the data_collator" in said[1]
        assert said[2].startswith("prediction_step of a subclass gives other inputs")
        assert "outside of an evaluation" in said[3] and "trainer.predict(dataset)" in said[3]
