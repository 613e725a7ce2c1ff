"""Counters that a model keeps in Python, and the values at which its code decides otherwise.

A trace of a few calls never reaches what begins after a hundred. So a counter is replaced by a
number that notes what it is compared with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

_MOST_VALUES = 8


class Counter:
    """Counter in Python state: its value before a call, and the values it was compared with.

    Args:
        value: of the counter before a call.
    """

    def __init__(self, value: float) -> None:
        self.value = value
        self._values: dict[float, None] = {}

    def note(self, value: float) -> None:
        """Record that code branches on whether the counter has reached a value."""
        if math.isfinite(value) and value > self.value:
            whole = math.floor(value)
            values = (whole, whole + 1) if type(self.value) is int else (value, value + 1)
            self._values |= dict.fromkeys(values)

    def values(self) -> list[float]:
        """Values to come at which code may decide otherwise."""
        return sorted(self._values)[:_MOST_VALUES]


def watched(value: float, counter: Counter) -> Any:
    """A number that notes what it, or what is computed of it, is compared with.

    Args:
        value: of the counter.
        counter: notes it.
    """
    return _number(value, counter, 1, 0)


def plain(value: Any) -> Any:
    """A number that is not watched any more; any other value as it is."""
    if not isinstance(value, _Watched):
        return value
    return int(value) if isinstance(value, int) else float.__float__(value)  # type: ignore[arg-type]


def _number(value: Any, counter: Counter, scale: float, shift: float, modulus: float = 0) -> Any:
    """A watched number: scale * counter + shift, behind `% modulus` where that is not 0."""
    kind = _KINDS.get(type(value))
    if kind is None or scale == 0:
        return value
    made = kind(value)
    made.counter, made.scale, made.shift, made.modulus = counter, scale, shift, modulus
    return made


class _Watched:
    """A number that notes its comparisons; mixed into `int` and `float`."""

    counter: Counter
    scale: float
    shift: float
    modulus: float

    def note(self, other: Any) -> None:
        """Note the value of the counter at which this number is another one."""
        if not isinstance(other, (int, float)):
            return
        if not self.modulus:
            self.counter.note((float(other) - self.shift) / self.scale)
        elif abs(self.scale) == 1:
            now = self.scale * self.counter.value + self.shift
            self.counter.note(self.counter.value + self.scale * ((other - now) % self.modulus))


def _compared(name: str, base: type) -> Callable[..., Any]:
    own = getattr(base, name)

    def compare(self: Any, other: Any) -> Any:
        self.note(other)
        return own(self, other)

    return compare


def _computed(name: str, base: type) -> Callable[..., Any]:
    own = getattr(base, name)

    def compute(self: Any, other: Any) -> Any:
        made = own(self, other)
        if type(other) not in (int, float) or self.modulus or made is NotImplemented:
            return made
        scale, shift, modulus = _AFFINE[name](self.scale, self.shift, other)
        return _number(made, self.counter, scale, shift, modulus)

    return compute


_AFFINE: dict[str, Callable[[float, float, float], tuple[float, float, float]]] = {
    "__add__": lambda scale, shift, other: (scale, shift + other, 0),
    "__radd__": lambda scale, shift, other: (scale, shift + other, 0),
    "__sub__": lambda scale, shift, other: (scale, shift - other, 0),
    "__rsub__": lambda scale, shift, other: (-scale, other - shift, 0),
    "__mul__": lambda scale, shift, other: (scale * other, shift * other, 0),
    "__rmul__": lambda scale, shift, other: (scale * other, shift * other, 0),
    "__truediv__": lambda scale, shift, other: (scale / other, shift / other, 0),
    "__floordiv__": lambda scale, shift, other: (scale / other, shift / other, 0),
    "__mod__": lambda scale, shift, other: (scale, shift, other),
}
"""What operators make of scale and shift, and by what they divide."""


def _class(base: type) -> type:
    members: dict[str, Any] = {name: _computed(name, base) for name in _AFFINE}
    members |= {
        name: _compared(name, base)
        for name in ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__")
    }

    def is_true(self: Any) -> bool:
        self.note(0)
        return bool(base(self))

    members |= {"__bool__": is_true, "__hash__": base.__hash__}
    return type(f"Watched{base.__name__.title()}", (_Watched, base), members)


_KINDS: dict[type, Any] = {int: _class(int), float: _class(float)}
