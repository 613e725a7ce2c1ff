from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from torch import nn
from transformers import Seq2SeqTrainingArguments, Trainer, TrainingArguments

from merak import MerakSeq2SeqTrainer, MerakTrainer
from merak.core.errors import ArgumentsError
from merak.trainer.unsupported import (
    names_after,
    refuse_compiled,
    refuse_other_arguments,
    set_use_cache,
)


@pytest.mark.parametrize(
    ("trainer", "kind", "message"),
    [
        (MerakTrainer, TrainingArguments, r"args is a TrainingArguments; MerakTrainer takes merak"),
        (MerakTrainer, Seq2SeqTrainingArguments, r"takes merak\.MerakSeq2SeqArguments, which"),
        (MerakSeq2SeqTrainer, type(None), r"args is nothing; MerakSeq2SeqTrainer takes"),
        (MerakSeq2SeqTrainer, TrainingArguments, r"takes merak\.MerakSeq2SeqArguments, which"),
    ],
)
def test_arguments_of_other_trainers_are_refused(
    trainer: type, kind: type, message: str, tmp_path: object
) -> None:
    args = None if kind is type(None) else kind(output_dir=str(tmp_path), use_cpu=True)
    with pytest.raises(ArgumentsError, match=message):
        refuse_other_arguments(trainer, args)


class Mixin(Trainer):
    def __init__(self, *args: object, mine: int = 0, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)


def test_names_of_a_trainer_are_those_of_its_bases() -> None:
    plain = names_after(MerakTrainer, MerakTrainer)
    assert "processing_class" in plain and "kwargs" not in plain and "mine" not in plain
    mixed = type("Mixed", (MerakTrainer, Mixin), {})
    assert {*names_after(mixed, MerakTrainer)} == {*plain, "mine"}


def test_a_compiled_model_is_refused_by_name() -> None:
    compiled = nn.Module()
    refuse_compiled(compiled)
    compiled._orig_mod = nn.Linear(2, 2)  # as torch.compile wraps a module
    with pytest.raises(ArgumentsError, match=r"torch.compile\(Linear\).*torch_compile=True"):
        refuse_compiled(compiled)


@dataclass(frozen=True)
class Frozen:
    width: int = 8


@pytest.mark.parametrize("config", [{"width": 8}, Frozen(), "base"])
def test_a_config_without_attributes_is_refused_by_name(config: object) -> None:
    model = nn.Linear(2, 2)
    set_use_cache(model, use_cache=True)
    model.config = SimpleNamespace()  # type: ignore[assignment]
    set_use_cache(model, use_cache=False)
    assert model.config.use_cache is False
    model.config = config  # type: ignore[assignment]
    said = rf"^Linear.config is a {type(config).__name__}, which takes no attributes.*settings"
    with pytest.raises(ArgumentsError, match=said):
        set_use_cache(model, use_cache=True)


def test_attributes_of_the_trainers_parts_are_declared_once() -> None:
    own = [cls for cls in MerakTrainer.__mro__ if cls.__module__.startswith("merak.")]
    names = [name for cls in own for name in vars(cls).get("__annotations__", {})]
    assert len(names) > 20
    assert sorted(names) == sorted(set(names))
