"""Methods that a trainer's subclass overrides: all of transformers' are decided on."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from packaging.version import Version
from transformers import Trainer

from merak import MerakTrainer
from merak.core.errors import ArgumentsError
from merak.trainer.subclass.overrides import OVERRIDES, refuse_overrides, trainer_methods


class OwnContext(MerakTrainer):
    def compute_loss_context_manager(self) -> Any:
        return super().compute_loss_context_manager()


class OwnStep(MerakTrainer):
    def training_step(self, model: Any, inputs: Any, *rest: Any) -> Any:
        loss = model(**inputs).loss
        loss.backward()
        return loss.detach()


class Inherits(OwnStep):
    def log(self, *args: Any, **kwargs: Any) -> None:
        """Logs nothing."""


class Mixin:
    def _save(self, *args: Any, **kwargs: Any) -> None:
        """Saves nothing."""


class Mixed(Mixin, MerakTrainer):
    """A method of transformers from a class that is no trainer."""


class Extends(MerakTrainer):
    def training_step(self, model: Any, inputs: Any, *rest: Any) -> Any:
        def inside() -> Any:
            return super(Extends, self).training_step(model, inputs, *rest)

        return inside()

    def create_optimizer(self, model: Any = None) -> Any:
        return super().create_optimizer(model)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)

    def own_method(self) -> None:
        """One of its own, which no trainer has."""


def test_every_method_of_the_installed_transformers_has_a_decision() -> None:
    assert set(trainer_methods()) - set(OVERRIDES) == set()


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"), reason="an older one has fewer methods"
)
def test_no_decision_is_about_a_method_that_is_gone() -> None:
    assert set(OVERRIDES) - set(trainer_methods()) == set()


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (OwnContext, r"OwnContext overrides compute_loss_context_manager, .*use bf16=True"),
        (OwnStep, r"OwnStep overrides training_step, and does not call super\(\).training_step"),
        (Inherits, r"OwnStep overrides training_step"),
        (Mixed, r"Mixin overrides _save, .*override save_model"),
    ],
)
def test_what_would_be_something_else_is_refused(cls: type, message: str) -> None:
    with pytest.raises(ArgumentsError, match=message):
        refuse_overrides(cls, MerakTrainer, extended_only=True)


def test_what_is_called_as_in_transformers_is_welcome() -> None:
    refuse_overrides(Extends, MerakTrainer, extended_only=True)
    refuse_overrides(MerakTrainer, MerakTrainer, extended_only=True)


def test_one_process_may_train_by_hand() -> None:
    refuse_overrides(OwnStep, MerakTrainer, extended_only=False)


def test_an_unknown_method_of_a_new_transformers_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Trainer, "own_method", lambda self: None, raising=False)
    with pytest.raises(ArgumentsError, match=r"Extends overrides own_method, which this Merak"):
        refuse_overrides(Extends, MerakTrainer, extended_only=True)
