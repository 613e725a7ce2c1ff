"""Parts of a recipe's training, and what makes them where a package has the trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import merak
from merak.cli.recipe.data.corpus import Corpus
from merak.cli.recipe.data.records import Source
from merak.cli.recipe.schema import Recipe
from merak.zoo.model_source import ModelSource


@dataclass(frozen=True, slots=True)
class TrainingParts:
    """Parts of a training run.

    Args:
        model: without weights yet; with adapters where the recipe has a section `lora`.
        args: the training arguments.
        corpus: the data, and what is saved beside the model.
        data_collator: makes batches of samples; None for the trainer's own.
        trainer_class: `merak.MerakTrainer`, or one of `merak.trl` or `merak.sentence_transformers`.
        losses: how it takes the loss, by the name of its argument; empty for the model's own.
    """

    model: Any
    args: Any
    corpus: Corpus
    data_collator: Any
    trainer_class: type[merak.MerakTrainer] = merak.MerakTrainer
    losses: Mapping[str, Any] = field(default_factory=dict)

    def make_trainer(self, **further: Any) -> merak.MerakTrainer:
        """Make the trainer.

        Args:
            **further: arguments of it that no recipe has, such as `callbacks`.
        """
        return self.trainer_class(**self.for_trainer(), **further)

    def for_trainer(self) -> dict[str, Any]:
        """Return the keyword arguments of the trainer's class."""
        return {
            "model": self.model,
            "args": self.args,
            "train_dataset": self.corpus.train,
            "eval_dataset": self.corpus.held_out,
            "processing_class": self.corpus.processor,
            "data_collator": self.data_collator,
            **self.losses,
        }


@dataclass(frozen=True, slots=True)
class Training:
    """How data of one format is learned from by a trainer of a package.

    Args:
        what: such data, in words.
        trainer: that learns from it, in words.
        package: its name, which is also that of the extra.
        check: refuses what the recipe, its model and its data lack, before anything is read.
        parts: makes the parts of the recipe, its model, its data, and the rows of the data.
    """

    what: str
    trainer: str
    package: str
    check: Callable[[Recipe, ModelSource, Source], None]
    parts: Callable[[Recipe, ModelSource, Source, Corpus], TrainingParts]
