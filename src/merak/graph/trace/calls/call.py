"""The call of a model with a batch, and its named outputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from accelerate.utils import convert_to_fp32  # type: ignore[import-untyped]
from torch import nn
from torch.utils._pytree import tree_leaves

from merak.core.errors import TraceError
from merak.graph.trace.calls.outputs import named_outputs
from merak.graph.trace.calls.unread import unread
from merak.graph.trace.state.slots import Slot, numbers_as_inputs

LossFunction = Callable[[Any, dict[str, Any]], torch.Tensor]


def calls_model(compute: Callable[[nn.Module, dict[str, Any]], tuple[Any, Any]]) -> LossFunction:
    """A loss function that calls the model itself, and gives the loss and what the model returns.

    Args:
        compute: `compute(model, batch) -> (loss, outputs)`; it may call the model in any way. The
            loss is None where there is none.
    """
    function: Any = compute
    vars(function)[_CALLS_MODEL] = True
    loss_fn: LossFunction = function
    return loss_fn


_CALLS_MODEL = "_merak_calls_model"


def does_call_model(loss_fn: LossFunction | None) -> bool:
    """Whether a loss function calls the model itself; then it may read anything, beside the batch.

    No file of a trace could be told to be of such a function.
    """
    return hasattr(loss_fn, _CALLS_MODEL)


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of a model's call, beside the batch itself.

    Args:
        columns: the batch's columns.
        fixed: keyword arguments that are no tensors.
        loss_fn: the loss function, where the model does not compute a loss itself.
        loss_columns: columns that go to the loss function alone.
        autocast: makes the context that the model runs under in mixed precision.
        host_random: names, "module:name", of the model's functions that draw on the host.
        numbers: places of Python numbers that are inputs, by their column.
        reshapes: whether the model changes the shape of its own inputs in place, and gets views.
        reads_on_host: whether what a loss that calls the model reads of tensors becomes outputs.
    """

    columns: tuple[str, ...]
    fixed: dict[str, Any]
    loss_fn: LossFunction | None
    loss_columns: tuple[str, ...]
    autocast: Callable[[], AbstractContextManager[Any]] | None = None
    host_random: tuple[str, ...] = ()
    numbers: dict[str, Slot] = field(default_factory=dict)
    reshapes: bool = False
    reads_on_host: bool = True


class InputReshaped(TraceError):
    """The model changes the shape of its own inputs in place, and must get views of the batch."""


Record = Callable[[Callable[[], Any], dict[str, torch.Tensor]], Any]
"""Runs a loss on a batch, and records what it reads on the host."""


def call_model(
    model: nn.Module,
    batch: dict[str, torch.Tensor],
    call: Call,
    record: Record = lambda run, batch: run(),
) -> dict[str, torch.Tensor]:
    """Call a model, and return its tensor outputs by name, a loss function's result first.

    Columns of objects have stand-ins, but for `record`. In evaluation a loss function is not called
    with a batch that has nothing for it, such as one of samples without labels, to be predicted.
    """
    if call.reshapes:
        batch = {name: tensor.view_as(tensor) for name, tensor in batch.items()}
    with numbers_as_inputs(batch, call.numbers) as own:
        return _called(model, own, call, record)


def _called(
    model: nn.Module, batch: dict[str, torch.Tensor], call: Call, record: Record
) -> dict[str, torch.Tensor]:
    given = unread(batch)
    if call.loss_fn is None or not (model.training or _is_for_loss(call.loss_columns, batch)):
        return dict(named_outputs(_run(model, given, call)))
    if does_call_model(call.loss_fn):
        compute: Any = call.loss_fn
        with _autocast_inside(model, call):
            loss, result = record(lambda: compute(model, {**given, **call.fixed}), batch)
        if loss is None:  # which nobody asks for: what the model returns is all there is
            return dict(named_outputs(result))
        return {"loss": loss} | {k: v for k, v in named_outputs(result) if k != "loss"}
    result = _run(model, _taken(model, given, call.loss_columns), call)
    loss = call.loss_fn(result, given)
    if not all(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(loss)):
        raise TraceError(
            "the loss function returns what is no tensor; return one number as a tensor: without "
            ".item(), and without figures behind it."
        )
    return {"loss": loss} | {k: v for k, v in named_outputs(result) if k != "loss"}


def _is_for_loss(loss_columns: tuple[str, ...], batch: Iterable[str]) -> bool:
    return not loss_columns or not set(loss_columns).isdisjoint(batch)


def _run(model: nn.Module, batch: dict[str, torch.Tensor], call: Call) -> Any:
    if call.autocast is None:
        return model(**batch, **call.fixed)
    with call.autocast():
        result = model(**batch, **call.fixed)
    return convert_to_fp32(result)


@contextmanager
def _autocast_inside(model: nn.Module, call: Call) -> Iterator[None]:
    """Context in which calls of a model run in mixed precision, and nothing else."""
    if call.autocast is None:
        yield
        return
    forward, autocast = model.forward, call.autocast

    @wraps(forward)
    def cast(*args: Any, **kwargs: Any) -> Any:
        with autocast():
            result = forward(*args, **kwargs)
        return convert_to_fp32(result)

    own = vars(model).get("forward")
    vars(model)["forward"] = cast
    try:
        yield
    finally:
        del vars(model)["forward"]
        if own is not None:
            vars(model)["forward"] = own


def _taken(
    model: nn.Module, batch: dict[str, torch.Tensor], loss_columns: tuple[str, ...]
) -> dict[str, torch.Tensor]:
    """The columns that the model's forward takes; the loss function reads the others."""
    parameters = inspect.signature(model.forward).parameters.values()
    takes_all = any(p.kind == inspect.Parameter.VAR_KEYWORD for p in parameters)
    names = set(batch) if takes_all else {p.name for p in parameters}
    return {n: value for n, value in batch.items() if n in names and n not in loss_columns}
