"""State outside of a model that its code may change: of the process, and of torch.

The environment, context variables, files that are written, and torch's settings. Lines that write
the environment and files are known by Python's audit events, others by names in code.
"""

from __future__ import annotations

import contextvars
import os
import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from operator import attrgetter
from types import FrameType
from typing import Any

import torch

from merak.core.source_lines import MERAK, is_generated, is_standard_library, model_line
from merak.graph.trace.state.slots import MISSING

_DEVICES = ("cpu", "cuda")
_TORCH = os.path.dirname(torch.__file__) + os.sep
_FLAGS = (
    "cudnn.enabled", "cudnn.benchmark", "cudnn.deterministic", "cudnn.allow_tf32",
    "cudnn.fp32_precision", "cudnn.conv.fp32_precision", "cudnn.rnn.fp32_precision",
    "cuda.matmul.allow_tf32", "cuda.matmul.fp32_precision", "fp32_precision",
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction", "mkldnn.enabled",
    "mkldnn.deterministic", "mkldnn.allow_tf32", "mkldnn.fp32_precision",
    "mkldnn.conv.fp32_precision", "mkldnn.rnn.fp32_precision", "mkldnn.matmul.fp32_precision",
)  # fmt: skip
_DEFAULT_DEVICE = "set_default_device"
_OF_DEVICES = {
    "set_autocast_enabled": "is_autocast_enabled",
    "set_autocast_dtype": "get_autocast_dtype",
}
_OF_CALLERS = {
    "set_grad_enabled": "is_grad_enabled",
    "inference_mode": "is_inference_mode_enabled",
    "set_num_threads": "get_num_threads",
    "set_autocast_cache_enabled": "is_autocast_cache_enabled",
    **_OF_DEVICES,
}
"""Settings that hold for a block of code around a call, or that no result depends on."""
_SETTINGS = {
    "set_default_dtype": "get_default_dtype",
    _DEFAULT_DEVICE: "",
    "set_float32_matmul_precision": "get_float32_matmul_precision",
    "use_deterministic_algorithms": "are_deterministic_algorithms_enabled",
    "set_deterministic_debug_mode": "get_deterministic_debug_mode",
    "utils.deterministic.fill_uninitialized_memory": "",
    "backends.cuda.enable_flash_sdp": "backends.cuda.flash_sdp_enabled",
    "backends.cuda.enable_mem_efficient_sdp": "backends.cuda.mem_efficient_sdp_enabled",
    "backends.cuda.enable_math_sdp": "backends.cuda.math_sdp_enabled",
    "backends.cuda.enable_cudnn_sdp": "backends.cuda.cudnn_sdp_enabled",
    "backends.cuda.allow_fp16_bf16_reduction_math_sdp": (
        "backends.cuda.fp16_bf16_reduction_math_sdp_allowed"
    ),
    "backends.mha.set_fastpath_enabled": "backends.mha.get_fastpath_enabled",
    **{f"backends.{name}": "" for name in _FLAGS},
    **_OF_CALLERS,
}
"""Settings of torch: what sets each, a function or attribute, and the function that reads it."""

Writes = MutableMapping[tuple[Any, Any], str]
"""Lines by what they have written: the form of one of `OUTSIDE`, and a key there."""


@dataclass(frozen=True, slots=True, eq=False)
class Outside:
    """A part of what is outside of a model: values by a key.

    Args:
        form: of a value's label, with `{}` for its key.
        now: what it holds.
        put: sets a value by its key; removes it for `MISSING`.
    """

    form: str
    now: Callable[[], dict[Any, Any]]
    put: Callable[[Any, Any], None]

    def label(self, key: Any) -> str:
        """A value, as people write it."""
        return self.form.format(getattr(key, "name", key))


def _put_variable(variable: contextvars.ContextVar[Any], value: Any) -> None:
    if value is not MISSING:  # else it goes with the context that a trace runs in
        variable.set(value)


def _put_environment(name: str, value: Any) -> None:
    os.environ.pop(name, None) if value is MISSING else os.environ.update({name: value})
    _of_torch.pop(name, None)


@cache
def _settings_read() -> tuple[tuple[str, Callable[[], Any]], ...]:
    """The settings, and what reads each, which takes a tenth of a microsecond."""
    found: list[tuple[str, Callable[[], Any]]] = []
    for name, read in _SETTINGS.items():
        if name in _OF_DEVICES:
            found.append((name, partial(_by_device, attrgetter(read)(torch))))
        elif read:
            found.append((name, attrgetter(read)(torch)))
        elif name == _DEFAULT_DEVICE:
            found.append((name, _default_device))
        else:
            holder, _, attribute = name.rpartition(".")
            found.append((name, partial(getattr, attrgetter(holder)(torch), attribute)))
    return tuple(found)


def _by_device(read: Callable[[str], Any]) -> tuple[Any, ...]:
    return tuple(map(read, _DEVICES))


def _default_device() -> torch.device | None:
    """The default device; torch's own function makes a tensor, which a trace would record."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


def torch_settings(*, of_callers: bool = True) -> dict[str, Any]:
    """Settings of torch that its operators depend on, by name; without what cannot be read.

    Args:
        of_callers: also those that hold for a block of code around a call, such as autocast.
    """
    found = {}
    for name, read in _settings_read():
        if of_callers or name not in _OF_CALLERS:
            try:  # of two interfaces, only one can be used
                found[name] = read()
            except (RuntimeError, AttributeError):
                continue
    return found


def _put_setting(name: str, value: Any) -> None:
    if value is MISSING or name == "inference_mode":  # which ends with its block
        return
    if name in _OF_DEVICES:
        for device, own in zip(_DEVICES, value, strict=True):
            attrgetter(name)(torch)(device, own)
    elif _SETTINGS[name] or name == _DEFAULT_DEVICE:
        attrgetter(name)(torch)(value)
    else:
        holder, _, attribute = name.rpartition(".")
        setattr(attrgetter(holder)(torch), attribute, value)


_of_torch: dict[str, str | None] = {}
"""What environment variables were before torch or Merak set them, which is no state of a model."""


def _environment() -> dict[str, str]:
    """The environment as the model's code has left it."""
    found = {**os.environ, **_of_torch}
    return {name: value for name, value in found.items() if value is not None}


_opened: dict[str, int] = {}
_lines: list[Writes] = []

ENVIRONMENT = Outside("os.environ[{!r}]", _environment, _put_environment)
CONTEXT = Outside(
    "the context variable {}", lambda: dict(contextvars.copy_context().items()), _put_variable
)
SETTINGS = Outside("torch.{}", torch_settings, _put_setting)
LASTING = Outside(SETTINGS.form, partial(torch_settings, of_callers=False), _put_setting)
"""Settings that hold from step to step."""
FILES = Outside("the file {}", lambda: dict(_opened), lambda path, count: None)
OUTSIDE = (ENVIRONMENT, CONTEXT, SETTINGS, FILES)


@contextmanager
def recorded_lines(writes: Writes) -> Iterator[None]:
    """Context in which lines that write the environment or a file are recorded.

    Args:
        writes: gets the lines.
    """
    _install()
    _lines.append(writes)
    try:
        yield
    finally:
        _lines.remove(writes)


@cache
def _install() -> None:
    sys.addaudithook(_audit)  # which cannot be removed


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if not _lines:
        return
    if event in ("os.putenv", "os.unsetenv"):
        name = os.fsdecode(args[0])
        if not _line_of_model(sys._getframe(1)):  # before it is set
            _of_torch.setdefault(name, os.environ.get(name))
            return
        _of_torch.pop(name, None)
        _lines[-1].setdefault((ENVIRONMENT.form, name), model_line(sys._getframe(1)))
    elif event == "open" and not isinstance(args[0], int) and _writes(*args[1:]):
        line = _line_of_model(sys._getframe(1))
        if line:
            path = os.path.abspath(os.fsdecode(args[0]))
            _opened[path] = _opened.get(path, 0) + 1
            _lines[-1].setdefault((FILES.form, path), line)


def _writes(mode: str | None, flags: int) -> bool:
    return bool(set(mode) & set("wax+") if mode else flags & (os.O_WRONLY | os.O_RDWR))


def _line_of_model(frame: FrameType | None) -> str:
    """The line of the model's code that calls this; empty for torch, Merak and imports."""
    while frame is not None:
        file = frame.f_code.co_filename
        if "importlib" in file or file.startswith((_TORCH, MERAK)):
            return ""
        if not (is_standard_library(file) or is_generated(file)):
            return model_line(frame)
        frame = frame.f_back
    return ""
