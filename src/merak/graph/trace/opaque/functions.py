"""Opaque functions: calls of Python functions, recorded by a trace as one operator each.

A function that loops over the tokens of a sequence is named by its import path, so that every
process that runs the graph finds it. While a model is traced its code object is replaced, so that
the call is recorded whichever name the model calls it by.
"""

from __future__ import annotations

import dis
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pkgutil import resolve_name
from types import CodeType, FrameType, FunctionType
from typing import Any, ParamSpec, TypeVar

from torch import nn

P = ParamSpec("P")
R = TypeVar("R")


class FunctionModule(nn.Module):
    """Module without weights whose forward calls a function.

    Args:
        name: of the function, as of `function_name`.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.function = _copy(function_of(name))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.function(*args, **kwargs)


def is_function(path: str) -> bool:
    """Whether an opaque call's path names a function, not a module of the model."""
    return ":" in path


def function_name(frame: FrameType) -> str | None:
    """The name, "module:name", of the function that runs in a frame; None if no import finds it.

    None, too, for a function with a closure, and for a method that reads its object.
    """
    code = frame.f_code
    if code.co_freevars or "<" in code.co_qualname or (is_method(code) and _reads_first(code)):
        return None
    name = f"{frame.f_globals.get('__name__', '')}:{code.co_qualname}"
    try:
        found = function_of(name)
    except (ImportError, AttributeError, ValueError):
        return None
    return name if found.__code__ is code else None


def is_method(code: CodeType) -> bool:
    """Whether code is that of a function in a class."""
    return "." in code.co_qualname


def _reads_first(code: CodeType) -> bool:
    """Whether a function reads its first argument, or has none."""
    if not code.co_argcount or code.co_varnames[0] in code.co_cellvars:
        return True
    return any(i.argval == code.co_varnames[0] for i in dis.get_instructions(code))


def function_of(name: str) -> FunctionType:
    """The function of a name, without its decorators.

    Raises:
        ImportError: there is no such module.
        AttributeError: there is no such function in it.
    """
    found = inspect.unwrap(resolve_name(name))
    if not isinstance(found, FunctionType):
        raise AttributeError(f"{name} is a {type(found).__name__}")
    return found


def in_own_thread(run: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Result of a call in a thread of its own.

    The modes that record a trace, and the stand-ins of functions, belong to the thread that traces.

    Args:
        run: what is called.
        *args: its arguments.
        **kwargs: its arguments by name.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run, *args, **kwargs).result()


@contextmanager
def replaced_functions(stand_ins: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace some functions by stand-ins, in this thread.

    Args:
        stand_ins: by the name of the function.
    """
    with ExitStack() as stack:
        for name, stand_in in stand_ins.items():
            stack.enter_context(_replaced(function_of(name), stand_in))
        yield


@contextmanager
def _replaced(function: FunctionType, stand_in: Callable[..., Any]) -> Iterator[None]:
    own, original, thread = function.__code__, _copy(function), threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        # An opaque module or function is probed in a thread of its own.
        if threading.get_ident() != thread:
            return original(*args, **kwargs)
        if is_method(own):  # which does not read its object
            args = (None, *args[1:])
        return stand_in(*args, **kwargs)

    function.__code__ = _calling(call)
    try:
        yield
    finally:
        function.__code__ = own


def _calling(stand_in: Callable[..., Any]) -> CodeType:
    """Code that passes all arguments on."""

    def call(*args: Any, **kwargs: Any) -> Any:
        function: Any = "stand-in"
        return function(*args, **kwargs)

    code = call.__code__
    constants = tuple(stand_in if c == "stand-in" else c for c in code.co_consts)
    return code.replace(co_consts=constants)


def _copy(function: FunctionType) -> FunctionType:
    """Another function object with the same code."""
    made = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made
