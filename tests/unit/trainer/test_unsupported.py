from __future__ import annotations

import pytest
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainingArguments

from merak import MerakTrainer
from merak.core.errors import ArgumentsError
from merak.trainer.unsupported import refuse_what_ranks_cannot_share


class Generates(MerakTrainer, Seq2SeqTrainer):
    """A trainer of both kinds."""


@pytest.mark.parametrize(
    ("trainer", "kind", "message"),
    [
        (MerakTrainer, TrainingArguments, r"args is a TrainingArguments; MerakTrainer takes merak"),
        (MerakTrainer, Seq2SeqTrainingArguments, r"Seq2SeqTrainingArguments is for evaluations"),
        (Generates, type(None), r"Generates is for evaluations that generate words .* generate on"),
        (Generates, TrainingArguments, r"Generates is for evaluations that generate words"),
    ],
)
def test_arguments_of_other_trainers_are_refused(
    trainer: type, kind: type, message: str, tmp_path: object
) -> None:
    args = None if kind is type(None) else kind(output_dir=str(tmp_path), use_cpu=True)
    with pytest.raises(ArgumentsError, match=message):
        refuse_what_ranks_cannot_share(trainer, args, {}, world_size=1)
