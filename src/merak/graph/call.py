"""How a model is called with a batch, and what it returns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import convert_to_fp32  # type: ignore[import-untyped]
from torch import nn

LossFunction = Callable[[Any, dict[str, Any]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Call:
    """How the model is called with a batch.

    Args:
        columns: the batch's columns.
        fixed: keyword arguments that are no tensors.
        loss_fn: the loss function, where the model does not compute a loss itself.
        loss_columns: columns that go to the loss function alone.
        autocast: makes the context that the model runs under in mixed precision.
        kept_whole: "module:name" of the model's functions that draw on the host.
    """

    columns: tuple[str, ...]
    fixed: dict[str, Any]
    loss_fn: LossFunction | None
    loss_columns: tuple[str, ...]
    autocast: Callable[[], AbstractContextManager[Any]] | None = None
    kept_whole: tuple[str, ...] = ()


def call_model(
    model: nn.Module, batch: dict[str, torch.Tensor], call: Call
) -> dict[str, torch.Tensor]:
    """The model's tensor outputs by name, the loss function's result as "loss" first.

    A tuple's first element is its loss where no loss function is given and it is a scalar, as
    transformers has it; a bare scalar tensor is the loss.
    """
    if call.loss_fn is None:
        return dict(_named_tensors(_run(model, batch, call)))
    result = _run(model, _taken(model, batch, call.loss_columns), call)
    loss = call.loss_fn(result, batch)
    return {"loss": loss} | {k: v for k, v in _named_tensors(result) if k != "loss"}


def _run(model: nn.Module, batch: dict[str, torch.Tensor], call: Call) -> Any:
    if call.autocast is None:
        return model(**batch, **call.fixed)
    with call.autocast():
        result = model(**batch, **call.fixed)
    return convert_to_fp32(result)


def _taken(
    model: nn.Module, batch: dict[str, torch.Tensor], loss_columns: tuple[str, ...]
) -> dict[str, torch.Tensor]:
    """The columns that the model's forward takes; the loss function reads the others."""
    parameters = inspect.signature(model.forward).parameters.values()
    takes_all = any(p.kind == inspect.Parameter.VAR_KEYWORD for p in parameters)
    names = set(batch) if takes_all else {p.name for p in parameters}
    return {n: value for n, value in batch.items() if n in names and n not in loss_columns}


def _named_tensors(result: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(result, torch.Tensor):
        yield ("loss" if result.ndim == 0 else "output"), result
        return
    if isinstance(result, Mapping):
        items = list(result.items())
    elif isinstance(result, (tuple, list)):
        first_is_loss = len(result) and isinstance(result[0], torch.Tensor) and result[0].ndim == 0
        items = [
            ("loss" if i == 0 and first_is_loss else f"output{i}", v) for i, v in enumerate(result)
        ]
    elif hasattr(result, "__dataclass_fields__"):
        items = [(name, getattr(result, name)) for name in result.__dataclass_fields__]
    else:
        items = []
    for name, value in items:
        if isinstance(value, torch.Tensor):
            yield str(name), value
        elif isinstance(value, (tuple, list, Mapping)):
            for inner, tensor in _named_tensors(value):
                yield f"{name}.{inner}", tensor
