"""Holders of Python state: the modules of a model, and plain objects such as configs in them."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from merak.graph.ir.state_read import LOSS, MODEL

_MAX_DEPTH, _MAX_HOLDERS = 4, 20_000
_NO_HOLDERS = (
    torch.Tensor, torch.Generator, type, Enum, types.ModuleType, types.FunctionType,
    types.MethodType, types.BuiltinFunctionType,
)  # fmt: skip
_OF_PYTHON = frozenset({"builtins", "torch", "numpy", "collections", "functools", "threading"})

OF_STEPS = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
"""Classes whose objects hold options of the next step, in lists: such as the learning rate."""

_BY_DICT = frozenset(("__dict__", "vars", "__getattribute__", "__getstate__"))
"""Names in code that reads attributes in a way that nothing sees."""


@dataclass(frozen=True, slots=True)
class Holder:
    """An object with attributes, and how it is reached.

    Args:
        value: the object.
        root: as of `StateRead`.
        path: as of `StateRead`.
        steps: as of `StateRead`; () for a module of the model.
    """

    value: Any
    root: str
    path: str
    steps: tuple[str, ...] = ()


def loss_holders(loss_fn: Callable[..., Any] | None) -> list[Holder]:
    """The objects that a loss function is a method of, or has in its closure.

    Args:
        loss_fn: the loss function; None for none.
    """
    return [] if loss_fn is None else list(_held_by_function(loss_fn, LOSS, "", (), 0))


def attributes(value: Any) -> dict[str, Any]:
    """An object's own attributes, without asking the object."""
    found: dict[str, Any] = object.__getattribute__(value, "__dict__")
    return found


def find_holders(model: nn.Module, loss_fn: Callable[..., Any] | None) -> list[Holder]:
    """Every module of a model, and the plain objects that are reached from it or from its loss.

    Args:
        model: the model.
        loss_fn: the loss function; None for none.
    """
    found = [Holder(m, MODEL, path) for path, m in model.named_modules()]
    found += loss_holders(loss_fn)
    seen = {id(attributes(holder.value)) for holder in found}
    for holder in found:  # which grows meanwhile
        if len(holder.steps) >= _MAX_DEPTH or len(found) > _MAX_HOLDERS:
            continue
        for name, value in list(attributes(holder.value).items()):
            if is_holder(value) and id(attributes(value)) not in seen:
                seen.add(id(attributes(value)))
                found.append(Holder(value, holder.root, holder.path, (*holder.steps, name)))
    return found


def _held_by_function(
    function: Any, root: str, path: str, steps: tuple[str, ...], depth: int
) -> Iterator[Holder]:
    """The object of a bound method, and objects in the closure of a function."""
    if issubclass(type(function), nn.Module) or is_holder(function):
        yield Holder(function, root, path, steps)
    elif issubclass(type(function), types.MethodType):
        if is_holder(function.__self__):
            yield Holder(function.__self__, root, path, (*steps, "__self__"))
    elif issubclass(type(function), types.FunctionType) and depth < _MAX_DEPTH:
        for name, value in closure(function).items():
            if not issubclass(type(value), nn.Module):  # of the model, as good as surely
                yield from _held_by_function(value, root, path, (*steps, f"({name})"), depth + 1)


def closure(function: types.FunctionType) -> dict[str, Any]:
    """Variables of a function's closure, by name."""
    found = {}
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not filled yet
            continue
    return found


def is_holder(value: Any) -> bool:
    """Whether a value is an object of a class that keeps its attributes in a dict."""
    cls = type(value)
    of_python = cls.__module__.split(".")[0] in _OF_PYTHON and not issubclass(cls, OF_STEPS)
    if issubclass(cls, (nn.Module, *_NO_HOLDERS)) or of_python:
        return False
    try:
        return type(attributes(value)) is dict
    except Exception:  # no attributes, or a property of the class's own in their place
        return False


@lru_cache(maxsize=4096)  # classes may be made in a loop
def slot_names(bases: tuple[type, ...]) -> tuple[str, ...]:
    """Names of the attributes that objects of a class keep in slots; none for Python's own.

    Args:
        bases: the class, and its bases.
    """
    cls = bases[0]
    if issubclass(cls, (nn.Module, *_NO_HOLDERS)) or cls.__module__.split(".")[0] in _OF_PYTHON:
        return ()
    slots = [base.__dict__.get("__slots__", ()) for base in bases]
    names = [name for own in slots for name in ((own,) if isinstance(own, str) else own)]
    return tuple(name for name in names if name[:2] != "__")


@lru_cache(maxsize=4096)  # classes may be made in a loop
def reads_by_dict(bases: tuple[type, ...]) -> bool:
    """Whether code of a class, or of its bases, may read attributes without asking by name."""
    for base in bases:
        if base is nn.Module or base is object:
            break
        if "__getattribute__" in vars(base) or "__getattr__" in vars(base):
            return True
        for value in vars(base).values():
            function = getattr(value, "__func__", getattr(value, "fget", value))
            function = getattr(function, "__wrapped__", function)
            if isinstance(function, types.FunctionType) and _BY_DICT & _names(function.__code__):
                return True
    return False


def _names(code: types.CodeType) -> frozenset[str]:
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return frozenset(code.co_names).union(*map(_names, inner))
