"""Methods of a trainer or callback that are a script's own: overridden, or replaced by assignment.

A method is judged by what the attribute is, not by the class that has it: `Trainer.compute_loss =
f`, `trainer.compute_loss = MethodType(f, trainer)` and a subclass all override `compute_loss`. An
attribute is a library's own where its code stands in the library under the attribute's name.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial, partialmethod
from types import CodeType, FunctionType, MethodType
from typing import Any

import accelerate  # type: ignore[import-untyped]
import transformers

from merak.core.source_lines import MERAK, is_installed

_LIBRARIES = (
    MERAK,
    *(os.path.dirname(str(own.__file__)) + os.sep for own in (transformers, accelerate)),
)
_PACKAGES = ("merak", "transformers", "accelerate")
SHARD_LOADER = "_shard_train_loader"
"""Method that a trainer puts in the place of a `get_train_dataloader` of a script's own."""


ANSWERED = "ANSWERED"
"""Attribute of a class of Merak's: names of methods that do here what those behind it do there."""


@dataclass(frozen=True, slots=True)
class Found:
    """An attribute of a script's own in the place of a library's method.

    Args:
        owner: the class that has it; "trainer" for the object.
        method: the attribute, as it is in the owner's namespace.
        follows_merak: whether a class of Merak's with a method of that name comes before it.
        replaces: whether it has been assigned: to an object, or to a class of a library.
    """

    owner: str
    method: object
    follows_merak: bool
    replaces: bool


def overrides_of(
    cls: type, name: str, assigned: Mapping[str, object] | None = None
) -> Iterator[Found]:
    """The attributes of a script's own for one method, in the order in which Python finds them.

    Args:
        cls: the class of a trainer or callback.
        name: of the method.
        assigned: the object's own attributes, which precede those of its class.
    """
    on_object = (assigned or {}).get(name)
    if on_object is not None and not _is_librarys_on_object(name, on_object):
        yield Found("trainer", on_object, follows_merak=False, replaces=True)
    follows_merak = is_answered = False
    for owner in cls.__mro__:
        is_answered |= name in vars(owner).get(ANSWERED, ())
        if name not in vars(owner) or (is_answered and _is_own(owner, name)):
            continue
        if not is_librarys(owner, name, vars(owner)[name]):
            is_library = _package(owner) in _PACKAGES
            yield Found(owner.__name__, vars(owner)[name], follows_merak, is_library)
        follows_merak |= _package(owner) == "merak"


def overriding(owner: object, name: str) -> object | None:
    """The first attribute of a script's own for a method; None where all are a library's.

    Args:
        owner: a trainer or callback.
        name: of the method.
    """
    first = next(overrides_of(type(owner), name, vars(owner)), None)
    return None if first is None else first.method


def bound(method: object, owner: object) -> Any:
    """A class's attribute as Python gives it to an object of the class.

    Args:
        method: as in the class's namespace.
        owner: the object.
    """
    bind = getattr(type(method), "__get__", None)
    return method if bind is None else bind(method, owner, type(owner))


def is_librarys(owner: type, name: str, method: object) -> bool:
    """Whether an attribute is the method that the source of Merak or transformers gives a class.

    Args:
        owner: the class.
        name: of the attribute.
        method: the attribute, as in the class's namespace.
    """
    code = _library_code(method)
    # Some methods of transformers are functions of another file that the class takes as its own.
    named = (name, f"{owner.__qualname__}.{name}")
    return code is not None and _package(owner) in _PACKAGES and code.co_qualname in named


def _is_own(owner: type, name: str) -> bool:
    """Whether an attribute is the method that a class's own source gives it."""
    code = getattr(vars(owner)[name], "__code__", None)
    file = getattr(sys.modules.get(owner.__module__), "__file__", None)
    own = f"{owner.__qualname__}.{name}"
    return code is not None and (code.co_filename, code.co_qualname) == (file, own)


def _is_librarys_on_object(name: str, method: object) -> bool:
    code = _library_code(method) if isinstance(method, MethodType) else None
    return code is not None and code.co_name in (name, SHARD_LOADER)


def _library_code(method: object) -> CodeType | None:
    """The code of a method of Merak or transformers; None for one that is a script's."""
    function = method.fget if isinstance(method, property) else method
    function = getattr(function, "__func__", function)
    while isinstance(function, FunctionType):
        code = function.__code__
        if not code.co_filename.startswith((*_LIBRARIES, contextlib.__file__)):
            return None
        if not hasattr(function, "__wrapped__"):
            return code if code.co_filename.startswith(_LIBRARIES) else None
        function = function.__wrapped__  # inside a decorator of theirs
    return None


def _package(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def calls(name: str, method: object) -> bool:
    """Whether a method may call another of that name: the one that it overrides or replaces.

    It may where its code names it (`super().NAME`), or where it holds it: in a closure, a default,
    a global, an argument of `functools.partial` or an attribute of a callable object.

    Args:
        name: of the method.
        method: that overrides it. One without any Python code may.
    """
    held = list(_held(method))
    if not held and not isinstance(method, FunctionType):
        return True
    return _names(name, method) or _any_calls(name, held, [method])


def _any_calls(name: str, functions: list[object], seen: list[object]) -> bool:
    for function in functions:
        if any(function is one for one in seen):
            continue
        seen.append(function)
        code = _library_code(function)
        if code is not None and code.co_name == name:
            return True
        if code is None and (
            _names(name, function) or _any_calls(name, list(_held(function)), seen)
        ):
            return True
    return False


def names_reached(owner: object, name: str) -> set[str]:
    """Names and texts in the code of a script's own method, and in its own code that this calls.

    Args:
        owner: a trainer or callback.
        name: of the method.
    """
    found: set[str] = set()
    seen: list[object] = [None]
    waiting = [overriding(owner, name)]
    while waiting:
        method = waiting.pop()
        if any(method is one for one in seen):
            continue
        seen.append(method)
        waiting += _held(method)
        if isinstance(method, FunctionType):
            codes = list(codes_of(method.__code__))
            texts = {text for code in codes for text in code.co_consts if isinstance(text, str)}
            further = (_names_in(method) | texts) - found
            found |= further
            waiting += [overriding(owner, one) for one in further]
    return found


def _names(name: str, function: object) -> bool:
    return isinstance(function, FunctionType) and name in _names_in(function)


def _names_in(function: FunctionType) -> set[str]:
    return {name for code in codes_of(function.__code__) for name in code.co_names}


def _held(method: object) -> list[object]:
    """What a method holds and may call."""
    kept: list[object] = []
    if isinstance(method, FunctionType):
        kept = [*_cells(method), *(method.__defaults__ or ())]
        kept += (method.__kwdefaults__ or {}).values()
        if not is_installed(method.__code__.co_filename):
            own = method.__globals__
            kept += [own[name] for name in _names_in(method) if name in own]
    elif isinstance(method, partial | partialmethod):
        kept = [method.func, *method.args, *method.keywords.values()]
    elif isinstance(method, property):
        kept = [method.fget]
    elif hasattr(method, "__func__"):
        kept = [method.__func__]
    elif callable(method) and isinstance(call := type(method).__call__, FunctionType):
        kept = [call, *getattr(method, "__dict__", {}).values()]
    return [one for one in kept if callable(one) and not isinstance(one, type)]


def _cells(function: FunctionType) -> Iterator[object]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # of one that has not been filled yet
            yield cell.cell_contents


def describe(method: object) -> str:
    """Name an attribute for people: its function, and the line where that is defined.

    Args:
        method: as in the namespace of a class or an object.
    """
    function: Any = method
    while isinstance(function, partial | partialmethod):
        function = function.func
    function = getattr(function, "fget", getattr(function, "__func__", function))
    code = getattr(function, "__code__", None)
    if code is None:
        return f"an object of {type(method).__qualname__}"
    return f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"


def codes_of(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of functions inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_of(constant)
