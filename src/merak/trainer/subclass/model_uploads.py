"""Loggers that upload the model when training ends, which one rank alone cannot do of a part."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import Any

from torch import nn
from transformers import TrainerCallback
from transformers.integrations.integration_utils import DVCLiveCallback, WandbCallback

from merak.core.errors import ArgumentsError
from merak.graph.weights.laid_out import part_of


def _wandb_request(callback: Any) -> str | None:
    chosen = callback._log_model
    return f"WANDB_LOG_MODEL={chosen.value}" if chosen.is_enabled else None


def _dvclive_request(callback: Any) -> str | None:
    return "log_model=True or HF_DVCLIVE_LOG_MODEL" if callback._log_model is True else None


_UPLOADERS: MappingProxyType[type[TrainerCallback], Callable[[Any], str | None]] = MappingProxyType(
    {WandbCallback: _wandb_request, DVCLiveCallback: _dvclive_request}
)
"""Loggers that save the model on rank 0 when training ends, and the setting that asks for it."""


def refuse_model_uploads(model: object, callbacks: Iterable[TrainerCallback]) -> None:
    """Refuse loggers that would save the model on rank 0 alone, of which each rank has a part.

    They do it when training has ended, so the error would come after all of it.

    Args:
        model: of the trainer.
        callbacks: of the trainer, transformers' own ones among them.

    Raises:
        ArgumentsError: there is one.
    """
    part = part_of(model) if isinstance(model, nn.Module) else None
    if part is None:
        return
    for callback in callbacks:
        for kind, request_of in _UPLOADERS.items():
            request = request_of(callback) if isinstance(callback, kind) else None
            if request is not None:
                raise ArgumentsError(
                    f"{kind.__name__} uploads the model from rank 0 when training ends "
                    f"({request}), but each rank has a part of it ({part.degrees}); leave that "
                    "out, and upload the folder that trainer.save_model() writes."
                )
