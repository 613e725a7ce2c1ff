"""Checks of evaluations and checkpoints before the first step, hours before they happen."""

from __future__ import annotations

import logging
from typing import Any

from transformers import Trainer

from merak.checkpoint.pretrained.file_tensors import check_saves
from merak.core.errors import WeightsError
from merak.core.rank0 import warn_on_rank0
from merak.data import check_not_empty, example_batch
from merak.trainer.columns import check_batch

logger = logging.getLogger(__name__)


def check_what_follows(trainer: Trainer) -> None:
    """Refuse evaluations and checkpoints of this training that cannot succeed.

    Args:
        trainer: with its datasets and arguments; nothing has been traced yet.

    Raises:
        DataError: an evaluation dataset without samples, or whose batches the model cannot take.
        WeightsError: a model that cannot be saved.
    """
    _check_evaluations(trainer)
    model: Any = trainer.model  # of any module, whatever transformers declares
    try:
        check_saves(model)
    except WeightsError as error:
        if trainer.args.save_strategy != "no":
            raise
        warn_on_rank0(logger, "%s Until then the model can be trained, but not saved.", error)


def _check_evaluations(trainer: Trainer) -> None:
    args = trainer.args
    if args.eval_strategy == "no" and not args.eval_on_start:
        return
    named: Any = trainer.eval_dataset
    for dataset in named.values() if isinstance(named, dict) else [named]:
        if dataset is None:
            continue
        check_not_empty(dataset, "evaluation")
        loader = trainer.get_eval_dataloader(dataset)
        check_batch(trainer, example_batch(loader, seed=args.seed), loader.dataset)
