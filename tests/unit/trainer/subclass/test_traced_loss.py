"""Losses that read the trainer: traced as in the first step, they are those of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import merak
from merak.core import mesh
from merak.core.errors import TraceError
from tests.tiers import one_in


@pytest.fixture(autouse=True)
def job() -> Iterator[None]:
    merak.init(device="cpu")
    yield
    mesh.reset()


class Predicts(nn.Module):
    """A model that computes no loss, whose forward takes one column."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"predicted": self.layers(x)}


def by_helper(trainer: Any) -> float:
    return 50 * float(trainer.optimizer.param_groups[0]["lr"])


FACTORS: dict[str, Callable[[Any], Any]] = {
    "max_steps": lambda trainer: 1 + trainer.state.global_step / trainer.state.max_steps,
    "epochs": lambda trainer: trainer.state.num_train_epochs,
    "schedule": lambda trainer: 1 + 50 * trainer.lr_scheduler.get_last_lr()[0],
    "groups": lambda trainer: 1 + 50 * trainer.optimizer.param_groups[-1]["lr"],
    "helper": by_helper,
    "rate": lambda trainer: 1 + 50 * trainer._get_learning_rate(),
    "handler": lambda trainer: 1 + 50 * trainer.callback_handler.lr_scheduler.get_last_lr()[0],
    "loader": lambda trainer: len(trainer.get_train_dataloader()),
    "dataset": lambda trainer: len(trainer.train_dataset),
    "accumulation": lambda trainer: 1 / trainer.current_gradient_accumulation_steps,
}


def trainers(base: Any, factor: Callable[[Any], Any]) -> Any:
    class Own(base):  # type: ignore[misc]
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, **of_step: Any
        ) -> Any:
            found = model(inputs["x"])
            error = found["predicted"] - inputs["target"] - inputs["shift"]
            loss = error.square().mean() * factor(self)
            return (loss, found) if return_outputs else loss

    return Own


def trained(cls: Any, kind: Any, folder: Path, **given: Any) -> list[float]:
    """Losses of a training and its evaluations."""
    torch.manual_seed(0)
    names = ("x", "target", "shift")
    samples = [{name: torch.randn(4) for name in names} for _ in range(16)]
    arguments: dict[str, Any] = {
        "max_steps": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2, "warmup_steps": 2, "logging_steps": 1, "eval_strategy": "steps",
        "eval_steps": 2, "label_names": ["target"], "remove_unused_columns": False,
    }  # fmt: skip
    arguments |= {"save_strategy": "no", "report_to": "none", "use_cpu": True, **given}
    args = kind(output_dir=str(folder), disable_tqdm=True, **arguments)
    trainer = cls(model=Predicts(), args=args, train_dataset=samples, eval_dataset=samples[:4])
    trainer.train()
    logs = trainer.state.log_history
    return [log[key] for log in logs for key in ("loss", "eval_loss") if key in log]


def test_columns_come_in_the_order_of_the_collator(tmp_path: Path) -> None:
    def first(base: Any) -> Any:
        class First(base):  # type: ignore[misc]
            def compute_loss(
                self, model: Any, inputs: Any, return_outputs: bool = False, **of_step: Any
            ) -> Any:
                x, target, shift = inputs.values()
                found = model(x)
                loss = (found["predicted"] - target.exp() - shift).square().mean()
                return (loss, found) if return_outputs else loss

        return First

    found = trained(first(merak.MerakTrainer), merak.MerakArguments, tmp_path / "ours")
    expected = trained(first(Trainer), TrainingArguments, tmp_path / "theirs")
    assert found == pytest.approx(expected)


@one_in(4)
@pytest.mark.parametrize("name", FACTORS)
def test_a_loss_reads_the_trainer_as_it_is_in_its_step(name: str, tmp_path: Path) -> None:
    own = trainers(merak.MerakTrainer, FACTORS[name])
    expected = trained(trainers(Trainer, FACTORS[name]), TrainingArguments, tmp_path / "their")
    assert len(expected) == 6
    assert trained(own, merak.MerakArguments, tmp_path) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", ["max_steps", "schedule", "late"])
def test_a_microbatch_is_chosen_with_a_loss_that_reads_the_trainer(
    name: str, tmp_path: Path
) -> None:
    factor = FACTORS.get(name, lambda trainer: trainer.late)

    class Late(trainers(merak.MerakTrainer, factor)):  # type: ignore[misc]
        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            self.late = 1.0

    chosen = {"per_device_train_batch_size": "auto", "global_batch": 4, "eval_strategy": "no"}
    chosen["gradient_accumulation_steps"] = 1
    losses = trained(Late, merak.MerakArguments, tmp_path, **chosen)
    own = trainers(merak.MerakTrainer, FACTORS.get(name, lambda trainer: 1.0))
    expected = trained(own, merak.MerakArguments, tmp_path / "given", eval_strategy="no")
    assert len(losses) == 4
    assert losses == pytest.approx(expected, rel=1e-4)


class Follows(merak.MerakTrainer):
    """A trainer with an optimizer of its own."""

    made = 0

    def create_optimizer(self, model: Any = None) -> Any:
        self.made += 1
        if self.optimizer is None:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.25)
        return self.optimizer


def test_what_stands_in_is_gone_before_training(tmp_path: Path) -> None:
    def momentum(trainer: Any) -> Any:
        return trainer.optimizer.param_groups[0]["momentum"]

    torch.manual_seed(0)
    samples = [{name: torch.randn(4) for name in ("x", "target", "shift")} for _ in range(4)]
    args = merak.MerakArguments(
        str(tmp_path), max_steps=1, per_device_train_batch_size=2, remove_unused_columns=False,
        save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = trainers(Follows, momentum)(Predicts(), args, train_dataset=samples)
    trainer.train()
    assert trainer.made == 2  # once for the trace
    assert trainer.optimizer.param_groups[0]["params"][0] is next(trainer.model.parameters())
    assert not trainer.is_as_in_first_step and trainer.state.global_step == 1


class Ranks(merak.MerakTrainer):
    """A reward trainer: pairs under names that the model's forward does not have."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        chosen, rejected = (
            model(input_ids=inputs[name]).logits.mean()
            for name in ("chosen_input_ids", "rejected_input_ids")
        )
        return -nn.functional.logsigmoid(chosen - rejected)


def pairs(folder: Path, **given: Any) -> Any:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=2, n_head=2)
    ids = torch.arange(32).view(8, 4) % 16
    names = ("chosen_input_ids", "rejected_input_ids")
    data = [{name: row + n for n, name in enumerate(names)} for row in ids % 15]
    args = merak.MerakArguments(
        str(folder), max_steps=2, per_device_train_batch_size=2, remove_unused_columns=False,
        save_strategy="no", report_to="none", disable_tqdm=True, **given,
    )  # fmt: skip
    return Ranks(GPT2LMHeadModel(config), args, train_dataset=data, eval_dataset=data)


def test_pairs_and_a_loss_without_outputs_train(tmp_path: Path) -> None:
    assert pairs(tmp_path).train().global_step == 2


def test_a_loss_without_outputs_is_refused_where_it_is_to_be_evaluated(tmp_path: Path) -> None:
    evaluated = {"eval_strategy": "steps", "label_names": ["chosen_input_ids"]}
    with pytest.raises(TraceError, match=rf"Ranks.compute_loss \({__file__}:\d+\) takes no notice"):
        pairs(tmp_path, **evaluated).train()


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (lambda loss, trainer: (loss, {}), r"compute_loss \(.*\) returns a tuple in training"),
        (lambda loss, trainer: None, r"compute_loss \(.*\) returns a NoneType in training"),
        (
            lambda loss, trainer: loss * trainer.absent,
            r"^the loss function fails, traced or not, at .*test_traced_loss.py:\d+: .*'absent'",
        ),
    ],
)
def test_a_loss_that_fails_is_named_and_the_model_is_not_blamed(
    result: Callable[[Any, Any], Any], said: str, tmp_path: Path
) -> None:
    class Own(merak.MerakTrainer):
        def compute_loss(self, model: Any, inputs: Any, *rest: Any, **of_step: Any) -> Any:
            return result(model(inputs["x"])["predicted"].mean(), self)

    with pytest.raises(TraceError, match=said):
        trained(Own, merak.MerakArguments, tmp_path, eval_strategy="no")
