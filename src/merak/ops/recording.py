"""Functions of tensors that are one operator to whoever records a graph.

What sends to other ranks cannot run while a graph is recorded, and none of its own operators means
anything alone. A recorder is told of the call, and runs it on a mesh that is only pretended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

Record = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Is called with a function and its arguments, in place of it, and returns its results."""

_RECORDS: list[Record] = []


def one_operator(function: F) -> F:
    """Decorator of a function that a recorder sees as one operator."""

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if _RECORDS:
            return _RECORDS[-1](function, args, kwargs)
        return function(*args, **kwargs)

    return called  # type: ignore[return-value]


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
