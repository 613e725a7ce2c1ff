"""Checks of a trainer's batches against its model's signature."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import Trainer

from merak.data import check_columns
from merak.trainer.subclass.methods import overriding


def check_batch(trainer: Trainer, batch: Mapping[str, Any], dataset: object) -> None:
    """Refuse a batch that the trainer's model cannot be called with, or that lacks what it needs.

    A `compute_loss` of the script's own may read any columns and call the model with others.

    Args:
        trainer: any.
        batch: its columns, and arguments that are no tensors.
        dataset: where the batch comes from, to say what it has.

    Raises:
        DataError: a column is missing, or one that nothing takes is there.
    """
    if overriding(trainer, "compute_loss") is not None:
        return
    model: Any = trainer.model  # of any module, whatever transformers declares
    check_columns(
        batch,
        model=model,
        needed=_main_inputs(model, batch),
        dataset=dataset,
        also_taken=("labels",) if trainer.compute_loss_func is not None else (),
    )


def _main_inputs(model: nn.Module | None, batch: Mapping[str, Any]) -> tuple[str, ...]:
    """The main input column of a transformers model, though its `forward` has a default for it.

    A model of one's own may not say that its main input has another name than `PreTrainedModel`'s.
    """
    name = getattr(model, "main_input_name", None)
    if name is None or model is None or "inputs_embeds" in batch:
        return ()
    parameters = inspect.signature(model.forward).parameters
    if name in parameters:
        return (name,)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    has_other = any(other in batch for other in parameters if other != "labels")
    return (name,) if takes_any and not has_other else ()
