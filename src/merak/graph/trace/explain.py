"""Errors of a trace, explained in a sentence that names the user's own line."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from merak.core.errors import TraceError
from merak.core.source_lines import (
    MERAK,
    is_installed,
    is_library,
    module_file,
    with_text,
)

_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
_DEPENDS_ON_VALUES = (*_NEEDS_VALUES, GuardOnDataDependentSymNode)
_NO_ARRAY = ".numpy() is not supported"
"""Of the error of a fake tensor whose values are read as an array of NumPy."""

_SHARED_CODE = ("/transformers/modeling_utils.py", "/transformers/masking_utils.py")
"""Code of transformers that is no single model's; an error in it is one of the line that calls it.
"""


class UntraceableError(TraceError):
    """Code that runs and cannot be traced, unless a module around it is opaque.

    Args:
        message: a sentence.
        why: its line and the cause, in short.
        modules: paths of the modules around it, outermost first, where no traceback has them.
    """

    def __init__(self, message: str, why: str, modules: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.why = why
        self.modules = modules


class FailsOnFakes(UntraceableError):
    """Code that fails on fake tensors; the module around it may run on real ones, as kernels do."""


def explain(
    model: nn.Module,
    loss_fn: Any,
    error: Exception,
    call_eagerly: Callable[[], Any],
    device: torch.device,
) -> TraceError:
    """Explain to the user an error of a trace.

    Args:
        model: the user's model.
        loss_fn: its loss function, or None.
        error: what the trace raised.
        call_eagerly: runs the model on the same fake tensors, without recording.
        device: device that these claim to be on.

    Returns:
        An error with the line at which the model fails, by itself or only when traced, and a fix.
    """
    for cause in causes(error):
        if isinstance(cause, TraceError):
            return cause
    name = type(model).__name__
    if not any(map(_depends_on_values, causes(error))):
        own = _error_of(call_eagerly)
        if isinstance(own, TraceError):
            return own
        if own is not None and "meta" in str(own) and (bare := _fake_tensor_of(model)):
            return TraceError(
                f"{name} reads the tensor {bare} at {_place(model, loss_fn, own)}, which is no "
                "parameter or buffer and has no values; register it with register_buffer."
            )
        if own is not None and not isinstance(own, (*_NEEDS_VALUES, UnsupportedOperatorException)):
            return _failure(model, loss_fn, own, device)
    place = _place(model, loss_fn, error)
    if any(map(_depends_on_values, causes(error))):
        return UntraceableError(
            f"{name} cannot be traced at {place}: what runs next, or a shape, depends there on the "
            f"values of a tensor ({_reason(error)}); use torch.where, fixed sizes, or switch the "
            "feature off in the model's config.",
            f"{place}: what runs next, or a shape, depends there on the values of a tensor",
        )
    return UntraceableError(
        f"{name} runs, but cannot be traced at {place}: {_reason(error)}; write that line with "
        "plain torch operators, or switch the feature off in the model's config.",
        f"{place}: {_reason(error)}",
    )


def _is_in_loss(loss_fn: Any, error: Exception) -> bool:
    """Whether an error comes out of a loss function, and not of a module that it calls."""
    module = nn.Module._call_impl.__code__
    own = type(loss_fn).forward if isinstance(loss_fn, nn.Module) else loss_fn
    loss, found = getattr(own, "__code__", None), False
    for cause in causes(error):
        for frame, _ in traceback.walk_tb(cause.__traceback__):
            found = (found or frame.f_code is loss) and frame.f_code is not module
    return found


def _failure(
    model: nn.Module, loss_fn: Any, error: Exception, device: torch.device
) -> FailsOnFakes:
    """The error of a model that fails on fake tensors without being traced."""
    name, place = type(model).__name__, _place(model, loss_fn, error)
    by_hand = "call it by hand with such a batch and correct"
    who, fix = f"{name} fails in its own forward", f"{by_hand} the model, its config, or the batch"
    if _lacks_operator(error, device):
        who = f"{name} cannot be trained on {device.type}"
        fix = (
            "choose another implementation in the model's config, for example "
            'attn_implementation="sdpa", or a device that has this one'
        )
    elif _is_in_loss(loss_fn, error):
        who, fix = "the loss function fails", f"{by_hand} it, or the batch"
    what = f"{place}: {_reason(error)}"
    return FailsOnFakes(f"{who}, traced or not, at {what}; {fix}.", what)


def _lacks_operator(error: Exception, device: torch.device) -> bool:
    """Whether torch says that it has no such operator on a device."""
    return isinstance(error, NotImplementedError) and device.type in str(error).lower()


def _depends_on_values(error: BaseException) -> bool:
    return isinstance(error, _DEPENDS_ON_VALUES) or _NO_ARRAY in str(error)


def _fake_tensor_of(model: nn.Module) -> str:
    """A tensor of the model that `merak.empty_weights` left empty and nobody will fill, or ""."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if issubclass(type(value), torch.Tensor) and value.is_meta:
                return f"{path}.{name}".removeprefix(".")
    return ""


def _error_of(call: Callable[[], Any]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Iterate over an error and its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0].rstrip(".") if lines else "no message"
    return f"{type(error).__name__}: {text}"


def _place(model: nn.Module, loss_fn: Any, error: Exception) -> str:
    """The innermost line of the model's own files on the way to an error: file, number, text."""
    frames = [
        (frame.filename, frame.lineno or 0)
        for cause in causes(error)
        for frame in traceback.extract_tb(cause.__traceback__)
        if not is_library(frame.filename)
    ]
    files = own_files(model, loss_fn)
    own = [frame for frame in frames if frame[0] in files or not is_installed(frame[0])]
    if not own and not frames:
        return _forward_of(model)
    file, line = (own or frames)[-1]
    return with_text(f"{file}:{line}")


def own_files(model: nn.Module, loss_fn: Any) -> set[str]:
    """Source files of the model's modules and loss function, without code shared by all models."""
    classes = {base for module in model.modules() for base in type(module).__mro__[:-1]}
    code = getattr(loss_fn, "__code__", None)
    files = {file for cls in classes if (file := _file(cls))}
    files |= {code.co_filename} if code is not None else set()
    return {f for f in files if not (is_library(f) or f.endswith(_SHARED_CODE) or MERAK in f)}


def _file(cls: type) -> str | None:
    forward = cls.__dict__.get("forward")
    code = getattr(inspect.unwrap(forward), "__code__", None) if callable(forward) else None
    if code is not None:
        return str(code.co_filename)
    return module_file(cls.__module__)


def _forward_of(model: nn.Module) -> str:
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    if code is None:
        return f"{type(model).__name__}.forward"
    return with_text(f"{code.co_filename}:{code.co_firstlineno}")


def refuse_dynamic_shape(source: str, value: Any, modules: tuple[str, ...] = ()) -> None:
    """Raise if a traced value has a data-dependent size.

    Args:
        source: the line that computes it.
        value: the value, a tensor or several.
        modules: paths of the modules that the line runs in, outermost first.

    Raises:
        UntraceableError: it has one.
    """
    many = value if isinstance(value, (tuple, list)) else (value,)
    for one in many:
        if isinstance(one, torch.Tensor) and any(isinstance(s, torch.SymInt) for s in one.shape):
            place = with_text(source) if source else "an unknown line"
            raise UntraceableError(
                f"the model cannot be traced at {place}: the shape of a tensor depends there on "
                "the values of another; use torch.where or a mask of fixed size instead of "
                "selecting elements.",
                f"{place}: the shape of a tensor depends there on the values of another",
                modules,
            )
