"""Non-tensor arguments in a batch, such as return_loss=True: a trace is made for their values.

They are not sent to other ranks, and every batch has the same ones, but for values that nothing
reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from merak.core.errors import DataError

_KINDS = (bool, int, float, str, type(None))


def split_non_tensors(batch: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a batch into its columns and its non-tensor arguments.

    Args:
        batch: by name of the model's argument.

    Returns:
        The columns; and the booleans, numbers, strings and None.

    Raises:
        DataError: the batch has no names.
    """
    if not hasattr(batch, "items"):
        raise DataError(
            f"the batch is a {type(batch).__name__}, which names no columns; give a dict with a "
            "tensor for each argument of the model's forward, and what the loss function reads."
        )
    non_tensors = {name: value for name, value in batch.items() if isinstance(value, _KINDS)}
    return {name: value for name, value in batch.items() if name not in non_tensors}, non_tensors


def drop_non_tensors(batch: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a batch, whose non-tensor arguments must be those of the trace.

    Args:
        batch: by name of the model's argument.
        expected: non-tensor arguments of the trace, with the type of those that nothing reads.

    Raises:
        DataError: the batch has other non-tensor arguments.
    """
    columns, non_tensors = split_non_tensors(batch)
    for name in (*expected, *non_tensors):
        both = name in non_tensors and name in expected
        if not both or not _is_expected(non_tensors[name], expected[name]):
            raise DataError(
                f"the model was traced for {_described(name, expected)} and a batch has "
                f"{_described(name, non_tensors)}; let every batch have the same arguments that "
                "are no tensors, or make this one a tensor."
            )
    return columns


def _is_expected(value: Any, expected: Any) -> bool:
    return bool(type(value) is expected if isinstance(expected, type) else value == expected)


def _described(name: str, non_tensors: Mapping[str, Any]) -> str:
    return f"{name}={non_tensors[name]!r}" if name in non_tensors else f"no plain {name}"
