"""Opaque functions that draw with NumPy or Python and return an array.

For instance, the masks of SpecAugment: scalars and a mask of the batch go in, an array of a fixed
shape comes out, and random numbers steer only the function's own loops. Such a function becomes one
operator, which runs before the segments of every microbatch.
"""

from __future__ import annotations

import inspect
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pkgutil import resolve_name
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from merak.core.errors import TraceError
from merak.core.source_lines import is_library
from merak.graph.ir.custom_operators import (
    Role,
    pack_arguments,
    register,
    role_of,
    unpack_arguments,
)
from merak.graph.trace.branches.rng_stream import draw_from_stream, is_stream_draw

_TRIALS = 3
_MAKERS = (torch.tensor, torch.as_tensor, torch.asarray)


class HostRandomError(TraceError):
    """A function draws on the host; it can be traced as one operator.

    Args:
        function: its name, "module:name"; None where a method of the model draws.
        message: the error for the user, if it cannot be one operator.
    """

    def __init__(self, function: str | None, message: str) -> None:
        super().__init__(message)
        self.function = function


def refuse_draw(frame: FrameType | None) -> None:
    """Raise for a model's code that draws on the host, with a function that can be one operator.

    Args:
        frame: the code's frame.

    Raises:
        HostRandomError: the code runs for a module of the model.
    """
    where, function = "", None
    while frame is not None and not isinstance(frame.f_locals.get("self"), nn.Module):
        if not is_library(frame.f_code.co_filename):
            where = where or f"{frame.f_code.co_filename}:{frame.f_lineno}"
            function = _name_of(frame) or function
        frame = frame.f_back
    if frame is None:
        return
    where = where or f"{frame.f_code.co_filename}:{frame.f_lineno}"
    raise HostRandomError(
        function,
        f"the model draws random numbers with Python's or NumPy's generator at {where}, which a "
        "trace would repeat for ever; draw with torch, or in a function of its own at the top of a "
        "module that returns an array, or switch the feature off in the model's config.",
    )


def _name_of(frame: FrameType) -> str | None:
    """The name of the function that runs in a frame, if it is at the top of a module."""
    found = frame.f_globals.get(frame.f_code.co_name)
    module = frame.f_globals.get("__name__")
    is_function = inspect.isfunction(found) and inspect.unwrap(found).__code__ is frame.f_code
    return f"{module}:{frame.f_code.co_name}" if is_function and module != "__main__" else None


def _run(
    tensors: Sequence[torch.Tensor],
    function: str,
    arguments: str,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Call a function with the host's generators seeded from torch's seed."""
    made = _called(
        resolve_name(function), [t.cpu() for t in tensors], arguments, torch.initial_seed()
    )
    if made is None or (tuple(made.shape), made.dtype) != (tuple(shape), dtype):
        gave = "no array" if made is None else f"{made.dtype} of {tuple(made.shape)}"
        raise TraceError(
            f"{function} gave {gave} after {dtype} of {tuple(shape)} when the model was traced; "
            "let it give arrays of one shape, or switch the feature off in the model's config."
        )
    return made


HOST_RANDOM = register(
    "host_random(Tensor[] tensors, str function, str arguments, int[] shape, ScalarType dtype) "
    "-> Tensor",
    Role.HOST_RANDOM,
    _run,
    fake=lambda tensors, function, arguments, shape, dtype: torch.empty(tuple(shape), dtype=dtype),
    is_seeded=True,
    callee=1,
)


def _called(
    function: Callable[..., Any], tensors: Sequence[torch.Tensor], arguments: str, seed: int
) -> torch.Tensor | None:
    """A function's array as a tensor; None if it returns no array."""
    args, kwargs = unpack_arguments(tensors, arguments)
    with _drawing(seed):
        made = function(*args, **kwargs)
    if isinstance(made, np.ndarray):
        made = torch.from_numpy(np.ascontiguousarray(made))
    return made if isinstance(made, torch.Tensor) else None


@contextmanager
def _drawing(seed: int) -> Iterator[None]:
    """Seed Python's and NumPy's generators inside; restore them afterwards."""
    before = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


class HostRandomFunctions(TorchFunctionMode):
    """Function mode that records functions which draw on the host as operators.

    Args:
        functions: "module:name" of each.
    """

    def __init__(self, functions: Sequence[str]) -> None:
        super().__init__()
        self._functions = functions
        self._arrays = WeakIdKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Copy a recorded array that a function makes a tensor of; pass any other call on."""
        kwargs = dict(kwargs or {})
        if func in _MAKERS and args and self._is_array(args[0]):
            wanted = {n: kwargs[n] for n in ("dtype", "device") if kwargs.get(n) is not None}
            return args[0].clone().to(**wanted) if wanted else args[0].clone()
        return func(*args, **kwargs)

    def follows(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor stands for an array that was drawn."""
        return tensor in self._arrays

    def _is_array(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value in self._arrays

    @contextmanager
    def recorded(self, model: nn.Module) -> Iterator[None]:
        """Replace the functions by operators in the model's source files."""
        names = {type(module).__module__ for module in model.modules()}
        from_numpy = torch.from_numpy  # a function that no mode sees
        with ExitStack() as stack:
            stack.enter_context(
                mock.patch.object(
                    torch,
                    "from_numpy",
                    lambda array: array.clone() if self._is_array(array) else from_numpy(array),
                )
            )
            for name in self._functions:
                function = resolve_name(name)
                new = self._recording(name, function)
                for module in {*names, name.partition(":")[0]}:
                    file = sys.modules.get(module)
                    same = [n for n, v in vars(file).items() if v is function] if file else []
                    for each in same:
                        stack.enter_context(mock.patch.object(file, each, new))
            yield

    def _recording(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        tracing = threading.get_ident()  # an opaque module is probed in a thread of its own

        def recorded(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != tracing:
                return function(*args, **kwargs)
            sizes = tuple(tuple(a) if isinstance(a, torch.Size) else a for a in args)
            packed = pack_arguments(sizes, kwargs)
            if packed is None:
                raise _refusal(name, "takes arguments that are no tensors, numbers or strings")
            tensors, arguments = packed
            shape, dtype = _tried(name, function, tensors, arguments)
            made = HOST_RANDOM(tensors, name, arguments, shape, dtype)
            self._arrays[made] = None
            return made

        return recorded


def _tried(
    name: str, function: Callable[..., Any], tensors: Sequence[torch.Tensor], arguments: str
) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of a function's array, the same for several seeds."""
    with _disable_current_modes():
        ones = [torch.ones(tuple(t.shape), dtype=t.dtype) for t in tensors]
        made = [_called(function, ones, arguments, seed) for seed in range(_TRIALS)]
    kinds = {None if m is None else (tuple(m.shape), m.dtype) for m in made}
    kind = kinds.pop()
    if kind is None:
        raise _refusal(name, "gives no array")
    if kinds:
        raise _refusal(name, "gives arrays of several shapes")
    return kind


def _refusal(name: str, what: str) -> TraceError:
    return TraceError(
        f"{name} draws random numbers with Python's or NumPy's generator and {what}, so it cannot "
        "be traced; let it take and give arrays and numbers alone, or switch the feature off in "
        "the model's config."
    )


def is_probing(frame: FrameType | None) -> bool:
    """Whether code runs inside a function that is called to find what it returns."""
    while frame is not None and frame.f_code is not _called.__code__:
        frame = frame.f_back
    return frame is not None


def seed_host_random(graph: fx.Graph) -> None:
    """Assign a random stream of its own to each operator of a host generator."""
    number = sum(is_stream_draw(node) for node in graph.nodes)
    for node in graph.nodes:
        if role_of(node) is Role.HOST_RANDOM:
            number += 1
            node.args = (number, str(node.target), *node.args)
            node.target = draw_from_stream
