"""Functions of tensors that are one operator to whoever records a graph.

What sends to other ranks cannot run while a graph is recorded, and none of its own operators means
anything alone. A recorder is told of the call, and runs it on a mesh that is only pretended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

Record = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Is called with a function and its arguments, in place of it, and returns its results."""

_RECORDS: list[Record] = []

_COUNTED: dict[Callable[..., Any], Callable[[Any, str], int]] = {}
"""Functions whose results have as many rows as values say, and what counts them."""


def one_operator(function: F) -> F:
    """Decorator of a function that a recorder sees as one operator."""

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if _RECORDS:
            return _RECORDS[-1](function, args, kwargs)
        return function(*args, **kwargs)

    return called  # type: ignore[return-value]


def counted(count: Callable[[Any, str], int]) -> Callable[[F], F]:
    """Decorator of one operator whose result has a number of rows that its `counts` say.

    Args:
        count: number of rows, of its arguments `counts` and `axis`.
    """

    def decorated(function: F) -> F:
        _COUNTED[function] = count
        return one_operator(function)

    return decorated


def is_recorded() -> bool:
    """Whether a recorder is told of such functions."""
    return bool(_RECORDS)


@dataclass(frozen=True, slots=True)
class RowCount:
    """What says how many rows the result of a call has: `count(counts, axis)`."""

    count: Callable[[Any, str], int]
    counts: Any
    axis: str


def row_count(function: Callable[..., Any], args: tuple[Any, ...]) -> RowCount | None:
    """What says how many rows a call's result has; None where its shape does.

    Args:
        function: as a recorder is given it.
        args: its arguments.
    """
    if function not in _COUNTED:
        return None
    given = signature(function).bind(*args).arguments
    return RowCount(_COUNTED[function], given["counts"], given["axis"])


@contextmanager
def recorded_by(record: Record) -> Iterator[None]:
    """Context in which such functions are recorded.

    Args:
        record: is called in place of each.
    """
    _RECORDS.append(record)
    try:
        yield
    finally:
        _RECORDS.pop()
