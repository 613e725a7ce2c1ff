"""Non-tensor arguments in a batch, such as return_loss=True: a trace is made for their values.

They are not sent to other ranks, and every batch has the same ones, but for values that nothing
reads. Where batches are of several kinds, each says its own in the name of a column, by which it
has a trace of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch

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


_KIND = "batch of "
"""Beginning of the name of the column that says what kind of batch it is of."""


def with_kind(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch whose order of columns and non-tensor arguments are a column's name.

    Args:
        batch: by name of the loss's argument, in the order that the loss reads.

    Returns:
        Its columns, in any order, and that one, which has no elements to read.
    """
    columns, non_tensors = split_non_tensors(batch)
    kind = json.dumps([list(batch), non_tensors])
    return {**columns, _KIND + kind: torch.zeros((), dtype=torch.bool)}


def without_kind(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch that `with_kind` was given; one without a kind as it is.

    Args:
        batch: columns by name; some may be missing, and others may have come.
    """
    named = next((name for name in batch if name.startswith(_KIND)), None)
    if named is None:
        return dict(batch)
    order, non_tensors = json.loads(named.removeprefix(_KIND))
    found = {name: value for name, value in {**batch, **non_tensors}.items() if name != named}
    return in_order(found, order)


def in_order(batch: Mapping[str, Any], order: Iterable[str]) -> dict[str, Any]:
    """A batch whose first arguments come in an order, as far as it has them.

    Args:
        batch: by name.
        order: names.
    """
    return {name: batch[name] for name in (*order, *batch) if name in batch}
