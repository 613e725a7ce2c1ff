"""Models without weights: meta parameters, each with the origin of its initial values."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from merak.core.errors import WeightsError
from merak.graph.weights.deferred_init import InitRecorder, InitTape, StorageView
from merak.graph.weights.pretrained import skeletons

ORIGIN_ATTRIBUTE = "_merak_origin"
"""Attribute of a meta tensor that holds its `InitOrigin`."""


@dataclass(frozen=True, slots=True)
class InitOrigin:
    """Origin of a meta tensor's initial values.

    Args:
        tape: what the constructor did.
        view: the tensor on the tape.
    """

    tape: InitTape
    view: StorageView


def origin_of(tensor: torch.Tensor) -> InitOrigin | None:
    """Origin of a parameter's or buffer's initial values; None if unknown."""
    origin = getattr(tensor, ORIGIN_ATTRIBUTE, None)
    assert origin is None or isinstance(origin, InitOrigin)
    return origin


def is_building() -> bool:
    """Whether `empty_weights` is active."""
    return any(isinstance(mode, InitRecorder) for mode in _get_current_dispatch_mode_stack())


@contextmanager
def empty_weights() -> Iterator[None]:
    """Build a model of any size: its parameters take no memory, its buffers are real.

    A parameter remembers how the constructor would have initialised it or, after
    `from_pretrained`, which part of the checkpoint it is; each rank later creates or reads only
    the parameters that it holds. `from_pretrained` of any transformers class takes a folder or a
    name on the hub as usual.

        with merak.empty_weights():
            model = AutoModelForCausalLM.from_config(config)

    Raises:
        WeightsError: the context is entered twice, or on top of the meta device; or a constructor
            needs the numbers of a parameter.
    """
    if is_building():
        raise WeightsError("merak.empty_weights was entered twice; build the model inside one.")
    if torch.get_default_device().type == "meta":
        raise WeightsError(
            "The default device is 'meta', where transformers leaves initialisation out; "
            "build the model under merak.empty_weights alone."
        )
    recorder = InitRecorder()
    registered: list[torch.Tensor] = []
    with ExitStack() as stack:
        for hook in _hooks(recorder, registered):
            stack.callback(hook.remove)
        stack.enter_context(_patches(recorder))
        stack.enter_context(skeletons(recorder))
        stack.enter_context(_NumbersOnCpu())
        stack.enter_context(recorder)
        yield
    _attach_origins(recorder, registered)


def _hooks(recorder: InitRecorder, registered: list[torch.Tensor]) -> Iterator[Any]:
    """Hooks that empty every parameter as a module registers it, and list it and the buffers."""

    def take_parameter(
        module: nn.Module, name: str, parameter: nn.Parameter | None
    ) -> nn.Parameter | None:
        if parameter is None or is_lazy(parameter):
            return None
        emptied = _empty(parameter)
        registered.append(emptied)
        recorder.label(emptied, f"{type(module).__name__}.{name}")
        return emptied

    def take_buffer(module: nn.Module, name: str, buffer: torch.Tensor | None) -> None:
        if buffer is not None:
            registered.append(buffer)

    yield register_module_parameter_registration_hook(take_parameter)  # type: ignore[arg-type]
    yield register_module_buffer_registration_hook(take_buffer)


def _empty(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter without its memory, the same object wherever possible.

    Constructors keep references to a parameter that they have registered, to initialise it, to tie
    it, or in lists of their own.
    """
    if parameter.is_meta:
        return parameter
    emptied = type(parameter)(parameter.data.to("meta"), requires_grad=parameter.requires_grad)
    emptied.__dict__.update(parameter.__dict__)
    try:
        torch.utils.swap_tensors(parameter, emptied)
    except RuntimeError:  # something in C++, such as a view with a gradient, refers to it
        return emptied
    return parameter


@contextmanager
def _patches(recorder: InitRecorder) -> Iterator[None]:
    """Patches that record rejection sampling as one operator."""
    original: Callable[..., torch.Tensor] = nn.init._no_grad_trunc_normal_

    def trunc_normal_(
        tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: Any = None
    ) -> torch.Tensor:
        return recorder.call(original, tensor, mean, std, a, b, is_random=True)

    with mock.patch.object(nn.init, "_no_grad_trunc_normal_", trunc_normal_):
        yield


class _NumbersOnCpu(TorchFunctionMode):
    """Function mode that keeps values which a parameter's meta device would lose.

    `torch.nn.init` skips such tensors; here it must run, to be recorded. A list of numbers that
    becomes a tensor on a parameter's device goes by way of the CPU, where the tape can see them.
    """

    _is_meta = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == self._is_meta and sys._getframe(1).f_globals["__name__"] == nn.init.__name__:
            return False
        if func in (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor):
            return _tensor_of_numbers(func, args, kwargs)
        if func == torch.Tensor.to and isinstance(args[0], nn.Parameter):
            return _moved(*args, **kwargs)
        return func(*args, **kwargs)


def _moved(parameter: nn.Parameter, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A parameter that a constructor moves to a device: one without memory stays where it is."""
    if not parameter.is_meta or "copy" in kwargs:
        return parameter.to(*args, **kwargs)
    _, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    return parameter if dtype is None else parameter.to(dtype)


def _tensor_of_numbers(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    device = kwargs.get("device")
    if device is None and func is torch.Tensor.new_tensor:
        device = args[0].device
    if device is None or torch.device(device).type != "meta":
        return func(*args, **kwargs)
    return func(*args, **{**kwargs, "device": "cpu"}).to("meta")


def _attach_origins(recorder: InitRecorder, registered: list[torch.Tensor]) -> None:
    views = {id(t): recorder.view_of(t) for t in registered if t.is_meta}
    recorder.tape.forget_all_but(views.values())
    for tensor in registered:
        if tensor.is_meta:
            setattr(tensor, ORIGIN_ATTRIBUTE, InitOrigin(recorder.tape, views[id(tensor)]))
