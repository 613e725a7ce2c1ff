"""Methods of a trainer that are replaced by assignment do what they do in a subclass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, default_data_collator

import merak
from merak import MerakTrainer
from merak.core import mesh
from merak.core.errors import ArgumentsError, TrainingError
from merak.trainer.subclass.methods import calls, overrides_of, overriding
from merak.trainer.subclass.overrides import (
    refuse_overrides,
    refuse_replaced_accelerator,
    trainer_methods,
)
from merak.trainer.subclass.parts_seen import _gradient_readers
from tests.tiers import one_in


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.linear(x).square().mean()}


SAMPLES = [{"x": torch.ones(4) * i} for i in range(8)]


def tenfold(
    self: Any, model: Any, inputs: Any, return_outputs: bool = False, **of_step: Any
) -> Any:
    outputs = model(**inputs)
    loss = 10 * outputs["loss"]
    return (loss, outputs) if return_outputs else loss


class Tenfold(MerakTrainer):
    compute_loss = tenfold  # type: ignore[assignment]


class Called:
    """A callable object, whose class has no `__get__`."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return tenfold(self.owner, *args, **kwargs)


def scaled(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def around(self: Any, *args: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = method(self, *args, return_outputs=True, **kwargs)
        return (10 * loss, outputs) if return_outputs else 10 * loss

    return around


class Mixin:
    """A class that a script changes when the trainer's class is there already."""


class Mixed(Mixin, MerakTrainer):
    """Takes `compute_loss` from the mixin, once that has one."""


@pytest.fixture(autouse=True)
def job() -> Iterator[None]:
    merak.init(device="cpu")
    yield
    mesh.reset()


def make(folder: Path, cls: type[MerakTrainer] = MerakTrainer, **more: Any) -> MerakTrainer:
    args = merak.MerakArguments(
        str(folder), max_steps=2, per_device_train_batch_size=2, logging_steps=1,
        save_strategy="no", disable_tqdm=True, report_to="none",
    )  # fmt: skip
    return cls(Model(), args, train_dataset=SAMPLES, **more)


def losses(trainer: Trainer) -> list[float]:
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


ON_CLASSES: dict[str, tuple[type, Any]] = {
    "function of transformers' class": (Trainer, tenfold),
    "function of Merak's class": (MerakTrainer, tenfold),
    "decorator that keeps the name": (Trainer, scaled(Trainer.compute_loss)),
    "partialmethod": (Trainer, functools.partialmethod(tenfold)),
    "function of a mixin": (Mixin, tenfold),
}

ON_OBJECTS: dict[str, Callable[[Any], Any]] = {
    "method": lambda trainer: MethodType(tenfold, trainer),
    "partial": lambda trainer: functools.partial(tenfold, trainer),
    "lambda": lambda trainer: lambda *args, **kwargs: tenfold(trainer, *args, **kwargs),
    "callable object": Called,
    "around the method": lambda trainer: functools.partial(
        scaled(lambda _, *args, **kwargs: trainer_loss(trainer, *args, **kwargs)), None
    ),
}


def trainer_loss(trainer: Any, *args: Any, **kwargs: Any) -> Any:
    return type(trainer).compute_loss(trainer, *args, **kwargs)


@one_in(3)
@pytest.mark.parametrize("kind", ON_CLASSES)
@one_in(2)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_loss_that_is_assigned_to_a_class_is_trained(
    kind: str, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, method = ON_CLASSES[kind]
    expected = losses(make(tmp_path, Tenfold))
    assert expected != losses(make(tmp_path))
    if when == "after":
        trainer = make(tmp_path, Mixed)
        monkeypatch.setattr(owner, "compute_loss", method, raising=False)
    else:
        monkeypatch.setattr(owner, "compute_loss", method, raising=False)
        trainer = make(tmp_path, Mixed)
    assert losses(trainer) == expected


@one_in(3)
@pytest.mark.parametrize("kind", ON_OBJECTS)
def test_a_loss_that_is_assigned_to_a_trainer_is_trained(kind: str, tmp_path: Path) -> None:
    trainer = make(tmp_path)
    trainer.compute_loss = ON_OBJECTS[kind](trainer)  # type: ignore[method-assign]
    assert losses(trainer) == losses(make(tmp_path, Tenfold))


def test_a_loss_that_comes_after_the_trace_is_refused(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    trainer.train()
    trainer.compute_loss = MethodType(tenfold, trainer)  # type: ignore[method-assign]
    trainer.args.max_steps = 4
    with pytest.raises(TrainingError, match=r"compute_loss is tenfold .*was traced with trans"):
        trainer.train()


def test_a_loss_that_a_callback_replaces_is_refused(tmp_path: Path) -> None:
    class Replaces(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            trainer.compute_loss = MethodType(tenfold, trainer)  # type: ignore[method-assign]

    trainer = make(tmp_path, callbacks=[Replaces()])
    with pytest.raises(TrainingError, match="compute_loss is tenfold"):
        trainer.train()


def reversed_loader(trainer: Any) -> DataLoader[Any]:
    return DataLoader(SAMPLES[::-1], 2, collate_fn=default_data_collator)  # type: ignore[arg-type]


class Reversed(MerakTrainer):
    get_train_dataloader = reversed_loader  # type: ignore[assignment]


@pytest.mark.parametrize("owner", [Trainer, MerakTrainer, None])
def test_a_loader_that_is_assigned_is_read(
    owner: type | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = losses(make(tmp_path, Reversed))
    if owner is not None:
        monkeypatch.setattr(owner, "get_train_dataloader", reversed_loader)
    trainer = make(tmp_path)
    if owner is None:
        trainer.get_train_dataloader = MethodType(reversed_loader, trainer)  # type: ignore[method-assign]
        assigned = trainer.get_train_dataloader
    assert losses(trainer) == expected
    if owner is None:  # the script's own is back where it was
        assert trainer.get_train_dataloader is assigned
    assert isinstance(trainer.get_train_dataloader(), DataLoader)


def around(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def counted(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return counted


def alone(self: Any, model: Any, inputs: Any, *rest: Any) -> Any:
    loss = model(**inputs)["loss"]
    loss.backward()
    return loss.detach()


@one_in(3)
@pytest.mark.parametrize(
    ("owner", "name", "method", "message"),
    [
        (Trainer, "training_step", around(Trainer.training_step),
         r"Trainer.training_step is replaced by around.*MerakTrainer's own method does not call"),
        (Trainer, "_prepare_inputs", around(Trainer._prepare_inputs), "assign it to merak.Merak"),
        (Trainer, "_save", around(Trainer._save), "override save_model"),
        (MerakTrainer, "training_step", alone, r"replaced by alone \(.*call it, or the method"),
        (MerakTrainer, "prediction_step", functools.partialmethod(alone), "does not call super"),
        (MerakTrainer, "evaluation_loop", functools.partial(alone, None), "call it, or the meth"),
    ],
)  # fmt: skip
def test_a_replaced_method_that_merak_does_not_call_is_refused(
    owner: type, name: str, method: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, method)
    with pytest.raises(ArgumentsError, match=message):
        refuse_overrides(MerakTrainer, MerakTrainer, extended_only=True)


@pytest.mark.parametrize(
    ("owner", "name", "method"),
    [
        (Trainer, "log", around(Trainer.log)),
        (Trainer, "evaluation_loop", around(Trainer.evaluation_loop)),
        (MerakTrainer, "training_step", around(MerakTrainer.training_step)),
        (MerakTrainer, "train", functools.partialmethod(around(MerakTrainer.train))),
    ],
)
def test_a_replaced_method_that_calls_the_other_is_welcome(
    owner: type, name: str, method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, method)
    refuse_overrides(MerakTrainer, MerakTrainer, extended_only=True)


def test_what_is_assigned_to_a_trainer_is_judged_too(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    own = trainer.training_step
    assigned: dict[str, object] = {"training_step": lambda *args: own(*args)}
    refuse_overrides(MerakTrainer, MerakTrainer, assigned, extended_only=True)
    assigned = {"training_step": MethodType(alone, trainer)}
    with pytest.raises(ArgumentsError, match=r"trainer.training_step is replaced by alone"):
        refuse_overrides(MerakTrainer, MerakTrainer, assigned, extended_only=True)


def test_no_method_of_the_libraries_is_taken_for_a_scripts(tmp_path: Path) -> None:
    for cls in (merak.MerakTrainer, merak.MerakSeq2SeqTrainer):
        found = [name for name in trainer_methods() if list(overrides_of(cls, name))]
        assert found == []
    trainer = make(tmp_path)
    assert [name for name in trainer_methods() if overriding(trainer, name) is not None] == []


def test_a_backward_of_accelerate_that_merak_does_not_call_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(tmp_path)
    refuse_replaced_accelerator(trainer.accelerator)
    with monkeypatch.context() as inside:
        inside.setattr(Accelerator, "backward", around(Accelerator.backward))
        with pytest.raises(ArgumentsError, match=r"Accelerator.backward is replaced by around"):
            make(tmp_path).train()
    trainer.accelerator.backward = alone
    with pytest.raises(ArgumentsError, match=r"Accelerator.backward is replaced by alone"):
        trainer.train()


class Base(TrainerCallback):
    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        kwargs["model"].weight.grad.zero_()


class Inherits(Base):
    """Has its method from a class of its own."""


def test_readers_of_gradients_are_found_where_they_are_inherited_or_assigned() -> None:
    assigned = TrainerCallback()
    assigned.on_step_end = MethodType(Base.on_step_end, assigned)  # type: ignore[method-assign]
    assert list(_gradient_readers([TrainerCallback()])) == []
    found = [name for name, _ in _gradient_readers([Inherits(), assigned])]
    assert found == ["Base.on_step_end"] * 2


def test_an_event_of_a_callback_may_be_assigned() -> None:
    callback = TrainerCallback()
    assert overriding(callback, "on_step_end") is None
    callback.on_step_end = lambda *args, **kwargs: None  # type: ignore[assignment]
    assert overriding(callback, "on_step_end") is callback.on_step_end


def test_a_method_calls_another_that_it_holds() -> None:
    def plain() -> None:
        """Calls nothing."""

    def default(original: Any = MerakTrainer.train) -> None:
        original()

    assert not calls("train", plain)
    assert not calls("train", functools.partial(plain))
    assert calls("train", default)
    assert calls("train", functools.partial(lambda f: f(), MerakTrainer.train))
    assert calls("train", lambda self: super(MerakTrainer, self).train())
