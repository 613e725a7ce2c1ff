"""Globals and closures that the user's own functions read, found in their code.

Code of installed packages does not change its globals from step to step; that of scripts and
notebooks may.
"""

from __future__ import annotations

import dis
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from merak.core.source_lines import is_installed, module_file
from merak.graph.ir.state_read import CONTEXT, GLOBALS, LOSS, MODEL, StateRead
from merak.graph.trace.state.holders import attributes, closure
from merak.graph.trace.state.kept import CONTAINERS
from merak.graph.trace.state.slots import is_plain, is_plain_dict


def function_reads(model: nn.Module, loss_fn: Callable[..., Any] | None) -> tuple[StateRead, ...]:
    """Values in globals and closures that forward and the loss function read.

    They are plain values, tensors, lists and dicts. What a method asks for with `getattr` or
    `hasattr`, and is not there, is among them.

    Args:
        model: the model.
        loss_fn: its loss function; None for none.
    """
    held = _method_closures(model)
    for steps, function in functions_of(loss_fn, ()):
        held += _closure_reads(LOSS, "", steps, function)
    found = {(read.root, read.path, read.steps): read for read in held}
    attributes_of_tensors = _tensor_attributes(model)
    for function in reached_functions(model, loss_fn):
        reads = [*_late_reads(model, function), *_environment_reads(function)]
        for name, line in _names(function.__code__, "LOAD_ATTR"):
            reads += [replace(read, source=line) for read in attributes_of_tensors.get(name, ())]
        for name, line in _names(function.__code__, "LOAD_GLOBAL", "LOAD_NAME"):
            reads += _global_reads(function, name, line)
        for read in reads:
            found.setdefault((read.root, read.path, read.steps), read)
    return tuple(found.values())


def _tensor_attributes(model: nn.Module) -> Mapping[str, list[StateRead]]:
    """Plain values that hang at parameters and buffers, by the attribute's name."""
    found: dict[str, list[StateRead]] = {}
    for path, module in model.named_modules():
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            for name, value in vars(tensor).items() if tensor is not None else ():
                if _is_constant(value) and name[:2] != "__":
                    found.setdefault(name, []).append(StateRead(MODEL, path, (key, name), ""))
    return found


def _environment_reads(function: types.FunctionType) -> Iterator[StateRead]:
    """Environment variables that a function may read: texts in code that names the environment."""
    if {"environ", "getenv"}.intersection(function.__code__.co_names):
        line = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
        for text in function.__code__.co_consts:
            if isinstance(text, str) and text.isidentifier():
                yield StateRead(GLOBALS, "os", ("[environ]", f"[{text}]"), line)


def reached_functions(
    model: nn.Module, loss_fn: Callable[..., Any] | None
) -> Iterator[types.FunctionType]:
    """The user's own functions that forward and the loss function may call.

    Args:
        model: the model.
        loss_fn: its loss function; None for none.
    """
    classes = [base for cls in {type(m) for m in model.modules()} for base in cls.__mro__]
    held_functions = [value for m in model.modules() for value in vars(m).values()]
    forwards = [cls.__dict__.get("forward") for cls in classes]
    waiting = [f for f in map(_own_function, [*forwards, *held_functions]) if f is not None]
    waiting += [function for _, function in functions_of(loss_fn, ())]
    seen: set[types.CodeType] = set()
    while waiting:
        function = waiting.pop()
        if function.__code__ in seen:
            continue
        seen.add(function.__code__)
        yield function
        for name, _ in _names(function.__code__, "LOAD_ATTR", "LOAD_METHOD"):
            waiting += [f for f in (_own_function(cls.__dict__.get(name)) for cls in classes) if f]
        for name, _ in _names(function.__code__, "LOAD_GLOBAL", "LOAD_NAME"):
            waiting += _called(function, function.__globals__.get(name))


def _method_closures(model: nn.Module) -> list[StateRead]:
    """Plain values in closures of methods of classes that are defined inside of a function."""
    found: list[StateRead] = []
    known: set[types.CodeType] = set()
    for path, module in model.named_modules():
        for cls in type(module).__mro__:
            for name, value in vars(cls).items():
                function = value if issubclass(type(value), types.FunctionType) else None
                if function is None or not function.__closure__ or function.__code__ in known:
                    continue
                known.add(function.__code__)
                if not is_installed(function.__code__.co_filename):
                    steps = (name, "__func__")
                    found += _closure_reads(MODEL, path, steps, function)
    return found


def _closure_reads(
    root: str, path: str, steps: tuple[str, ...], function: types.FunctionType
) -> Iterator[StateRead]:
    """Reads of the plain values in a function's closure."""
    line = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
    for name, value in closure(function).items():
        yield from _reads_of(value, root, path, (*steps, f"({name})"), line)


def _reads_of(
    value: Any, root: str, path: str, steps: tuple[str, ...], line: str
) -> Iterator[StateRead]:
    """Reads of a plain value, a tensor, a list or a dict; of a dict of plain values, of each."""
    if not _is_constant(value):
        return
    yield StateRead(root, path, steps, line)
    for key in value if is_plain_dict(value) else ():
        yield StateRead(root, path, (*steps, f"[{key}]"), line)


def functions_of(
    function: Any, steps: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], types.FunctionType]]:
    """A function of the user, and those in its closure, with the steps that lead to them."""
    if issubclass(type(function), types.MethodType):
        yield from functions_of(function.__func__, (*steps, "__func__"))
    elif issubclass(type(function), partial):
        yield from functions_of(function.func, (*steps, "func"))
    elif issubclass(type(function), types.FunctionType):
        if not is_installed(function.__code__.co_filename):
            yield steps, function
        for name, value in closure(function).items():
            if issubclass(type(value), (types.FunctionType, types.MethodType)) and len(steps) < 4:
                yield from functions_of(value, (*steps, f"({name})"))


def lines_that_store(
    model: nn.Module, loss_fn: Callable[..., Any] | None, name: str, *operations: str
) -> list[str]:
    """Lines of the user's own functions that set an attribute or variable.

    Args:
        model: the model.
        loss_fn: its loss function; None for none.
        name: of the attribute or variable.
        *operations: of Python's bytecode, such as "STORE_ATTR".
    """
    return [
        line
        for function in reached_functions(model, loss_fn)
        for found, line in _names(function.__code__, *operations)
        if found == name
    ]


def _own_function(value: Any) -> types.FunctionType | None:
    """The user's own function that a value is, inside its decorators."""
    try:
        function = getattr(value, "__wrapped__", getattr(value, "__func__", value))
    except Exception:  # of the object's own `__getattr__`, such as a lazy module's
        return None
    if not issubclass(type(function), types.FunctionType):
        return None
    return None if is_installed(function.__code__.co_filename) else function


def _called(function: types.FunctionType, value: Any) -> list[types.FunctionType]:
    """The user's own functions that a function may call by a global: it, or those of a module."""
    values = [value]
    if issubclass(type(value), types.ModuleType):
        values = [vars(value)[name] for name in function.__code__.co_names if name in vars(value)]
    return [found for found in map(_own_function, values) if found is not None]


def _names(code: types.CodeType, *operations: str) -> Iterator[tuple[str, str]]:
    """Names that code reads by some operations, with the line of each."""
    for operation, name, line in _operations(code, code.co_filename):
        if operation in operations:
            yield name, line
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant, *operations)


@lru_cache(maxsize=4096)  # every trace asks for the same code
def _operations(code: types.CodeType, file: str) -> tuple[tuple[str, str, str], ...]:
    """Operations that load, store or delete in the code of a file, each with its name and line."""
    line, found = code.co_firstlineno, []
    for instruction in dis.get_instructions(code):
        line = instruction.starts_line or line
        if instruction.opname.startswith(("LOAD_", "STORE_", "DELETE_")):
            found.append((instruction.opname, str(instruction.argval), f"{file}:{line}"))
    return tuple(found)


def _global_reads(function: types.FunctionType, name: str, line: str) -> Iterator[StateRead]:
    """Reads of a global: of a plain value, or of plain attributes of an object or module."""
    module = str(function.__globals__.get("__name__"))
    if vars(sys.modules.get(module, sys)) is not function.__globals__:
        return  # not reached by its module's name
    value: Any = function.__globals__.get(name)
    if type(value) is ContextVar and _is_constant(value.get(None)):
        yield StateRead(GLOBALS, module, (f"[{name}]", CONTEXT), line)
    elif _is_constant(value) and name in function.__globals__ and not name.startswith("__"):
        yield from _reads_of(value, GLOBALS, module, (f"[{name}]",), line)
    elif issubclass(type(value), types.ModuleType):
        if not is_installed(module_file(value.__name__) or "<built in>"):
            for own in _attributes_read(function, value):
                yield StateRead(GLOBALS, value.__name__, (f"[{own}]",), line)
    elif issubclass(type(value), types.FunctionType):
        for steps, inner in functions_of(value, (f"[{name}]",)):
            yield from _closure_reads(GLOBALS, module, steps, inner)
    elif _has_dict(value) and not is_installed_class(value):
        for own in _attributes_read(function, value):
            yield StateRead(GLOBALS, module, (f"[{name}]", own), line)


def _has_dict(value: Any) -> bool:
    """Whether an object keeps attributes in a dict; its own code is not asked."""
    return bool(type(value).__dictoffset__)


def is_installed_class(value: Any) -> bool:
    """Whether a value is a class that is not the user's own."""
    if not issubclass(type(value), type):
        return False
    file = module_file(value.__module__)
    return value.__module__ != "__main__" and is_installed(file or "<built in>")


def _attributes_read(function: types.FunctionType, value: Any) -> list[str]:
    try:
        own, requested = attributes(value), _requested(function)
    except Exception:  # of a property in their place: it is not looked at
        return []
    names = dict.fromkeys(n for n in (*function.__code__.co_names, *requested) if n[:2] != "__")
    return [
        n
        for n in names
        if (_is_constant(own[n]) if n in own else n in requested and _lacks(value, n))
    ]


def _late_reads(model: nn.Module, function: types.FunctionType) -> Iterator[StateRead]:
    """Reads of what modules and their classes do not have, but a method of theirs asks for."""
    names = _requested(function)
    line = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
    known: set[type] = set()
    for path, module in model.named_modules() if names else ():
        if type(module) in known or getattr(type(module), function.__name__, None) is not function:
            continue
        known.add(type(module))
        for name in names:
            if _lacks(module, name):
                yield StateRead(MODEL, path, (name,), line)


def _requested(function: types.FunctionType) -> tuple[str, ...]:
    """Names that a function may give to `getattr` or `hasattr`."""
    code = function.__code__
    if not {"getattr", "hasattr"}.intersection(code.co_names):
        return ()
    texts = (c for c in code.co_consts if isinstance(c, str) and c.isidentifier())
    return tuple(text for text in texts if text[:2] != "__")


def _lacks(value: Any, name: str) -> bool:
    try:
        return not hasattr(value, name)
    except Exception:  # whatever the user's own attributes raise
        return False


def _is_constant(value: Any) -> bool:
    return is_plain(value) or type(value) in (torch.Tensor, set, *CONTAINERS)
