from __future__ import annotations

import pytest
from transformers import Seq2SeqTrainingArguments, TrainingArguments

from merak import MerakSeq2SeqTrainer, MerakTrainer
from merak.core.errors import ArgumentsError
from merak.trainer.unsupported import refuse_what_ranks_cannot_share


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
        refuse_what_ranks_cannot_share(trainer, args, {}, world_size=1)
