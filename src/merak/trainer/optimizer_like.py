"""Optimizers like a trainer's own, for other parameters: they tell the size of its state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import Trainer


def similar_optimizer(
    trainer: Trainer, parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """An optimizer of the trainer's class and arguments, for other parameters.

    Args:
        trainer: any; it is left as it is.
        parameters: what the optimizer is to step.
    """
    if trainer.optimizer is not None:
        similar = type(trainer.optimizer)
        own: torch.optim.Optimizer = similar(parameters, **trainer.optimizer.defaults)
        return own
    model: Any = trainer.model  # of any module, whatever transformers declares
    chosen = trainer.optimizer_cls_and_kwargs
    cls, kwargs = chosen or trainer.get_optimizer_cls_and_kwargs(trainer.args, model)
    made: torch.optim.Optimizer = cls(parameters, **kwargs)
    return made
