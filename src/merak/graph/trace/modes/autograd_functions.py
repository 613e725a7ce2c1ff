"""Autograd functions with a backward of their own, recorded as one operator each.

A trace sees only what a function's forward does, so its own backward would be lost. While a model
is traced, `Function.apply` therefore comes to the operator `merak::autograd_function`, which the
trace records, and which applies the function when the segment runs.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pkgutil import resolve_name
from types import FunctionType
from typing import Any
from unittest import mock

import torch
from torch.autograd import Function
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointFunction

from merak.core.rank0 import warn_once
from merak.core.source_lines import model_line
from merak.graph.ir.custom_operators import Role, pack_arguments, register, unpack_arguments
from merak.graph.trace.autograd.calls import applying, is_recording, plain_apply
from merak.graph.trace.explain import UntraceableError
from merak.graph.trace.opaque.collectives import refuse_in_function

logger = logging.getLogger(__name__)

_APPLY: Callable[..., Any] = inspect.getattr_static(Function, "apply").__func__


def named_function(function: str) -> type[Function]:
    """The autograd function of a name, "module:class"."""
    found: type[Function] = resolve_name(function)
    return found


def call_function(
    tensors: Sequence[torch.Tensor], function: str, arguments: str
) -> list[torch.Tensor]:
    """Apply an autograd function; the kernel of `merak::autograd_function`.

    Args:
        tensors: its tensors.
        function: its name, "module:class".
        arguments: all its arguments, as of `pack_arguments`.
    """
    args, _ = unpack_arguments(tensors, arguments)
    result = _APPLY(named_function(function), *args)
    return list(result) if isinstance(result, tuple) else [result]


def is_of_torch_alone(function: str) -> bool:
    """Whether an autograd function's Python reads nothing that may change between steps.

    It reads its arguments and constants, and calls torch, `math`, and functions that do likewise.

    Args:
        function: its name, "module:class".
    """
    own = vars(named_function(function)).values()
    methods = [getattr(method, "__func__", method) for method in own]
    return all(_reads_constants(m, set()) for m in methods if inspect.isfunction(m))


def _reads_constants(function: FunctionType, seen: set[FunctionType]) -> bool:
    if function in seen:
        return True
    seen.add(function)
    read = inspect.getclosurevars(function)
    if read.nonlocals:
        return False
    for name, value in read.globals.items():
        module = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", "")
        if str(module).partition(".")[0] in ("torch", "math"):
            continue
        is_number = isinstance(value, int | float | str) and name.isupper()
        if not is_number and not (inspect.isfunction(value) and _reads_constants(value, seen)):
            return False
    return True


AUTOGRAD_FUNCTION = register(
    "autograd_function(Tensor[] tensors, str function, str arguments) -> Tensor[]",
    Role.AUTOGRAD_FUNCTION,
    call_function,
    callee=1,
)


@contextmanager
def record_autograd_functions(model: torch.nn.Module) -> Iterator[None]:
    """Record autograd functions of a trace as one operator each; checkpoints are traced through."""
    depth: list[type] = []

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        if issubclass(cls, CheckpointFunction):
            return _run_reentrant(*args)
        is_known = cls.__module__.startswith(("torch.", "merak.graph."))
        if depth or is_known or not torch.is_grad_enabled():
            return plain_apply(cls, *args, **kwargs)
        depth.append(cls)
        try:
            return _recorded(model, cls, args, kwargs)
        finally:
            depth.pop()

    with applying(apply), _plain_checkpoints():
        yield


def _run_reentrant(run: Callable[..., Any], _: bool, *args: Any) -> Any:
    """Run a reentrant checkpoint as eager code does: without gradients unless an input has one."""
    inputs = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if not torch.is_grad_enabled() or any(tensor.requires_grad for tensor in inputs):
        return run(*args)
    warn_once(
        logger,
        "No input of the reentrant checkpoint at %s requires a gradient, so the weights in it get "
        "none, as in PyTorch without Merak; pass use_reentrant=False to train them.",
        model_line(),
    )
    with torch.no_grad():
        return run(*args)


@contextmanager
def _plain_checkpoints() -> Iterator[None]:
    """Run checkpoints without recomputation while calls of autograd are recorded."""
    own = torch_checkpoint._checkpoint_without_reentrant_generator

    def around(*args: Any, **kwargs: Any) -> Iterator[None]:
        if is_recording():
            yield
        else:
            yield from own(*args, **kwargs)

    with mock.patch.object(torch_checkpoint, own.__name__, around):
        yield


def _recorded(
    model: torch.nn.Module, cls: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    name = f"{cls.__module__}:{cls.__qualname__}"
    packed = pack_arguments(args, kwargs)
    problem = "is defined inside a function" if "<locals>" in name else ""
    if packed is None or kwargs or any(isinstance(a, (list, tuple, dict)) for a in args):
        problem = "takes arguments that are neither tensors nor plain numbers and strings"
    if packed is None or problem:
        what = f"the autograd function {cls.__qualname__}, which {problem}"
        raise UntraceableError(
            f"{type(model).__name__} calls {what}; define it at the top of a module and pass it "
            "tensors, numbers and strings by position, so that every rank can call it.",
            f"it calls {what}",
        )
    single: list[bool] = []
    original = _APPLY

    def seen(function: type[Function], *own: Any) -> Any:
        result = original(function, *own)
        single.append(isinstance(result, torch.Tensor))
        return result

    refuse_in_function(cls, original, args)
    with mock.patch.dict(globals(), {"_APPLY": seen}):
        results = AUTOGRAD_FUNCTION(packed[0], name, packed[1])
    return results[0] if single[0] else tuple(results)
