"""Arguments of a batch that are no tensors, such as return_loss=True: a trace is for their values.

They are part of how the model is called, not of what it is called with: they do not travel to other
ranks, and every batch has the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from merak.core.errors import DataError

_KINDS = (bool, int, float, str, type(None))


def split_plain(batch: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Part a batch into its columns and its plain arguments.

    Args:
        batch: by name of the model's argument.

    Returns:
        What is no plain value, and truth values, numbers, texts and None.
    """
    plain = {name: value for name, value in batch.items() if isinstance(value, _KINDS)}
    return {name: value for name, value in batch.items() if name not in plain}, plain


def without_plain(batch: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a batch whose plain arguments are those that the model was traced with.

    Args:
        batch: by name of the model's argument.
        expected: the plain arguments.

    Raises:
        DataError: it has others.
    """
    columns, plain = split_plain(batch)
    for name in (*expected, *plain):
        if (name in plain) != (name in expected) or plain[name] != expected[name]:
            raise DataError(
                f"the model was traced for {_said(name, expected)} and a batch has "
                f"{_said(name, plain)}; let every batch have the same arguments that are no "
                "tensors, or make this one a tensor."
            )
    return columns


def _said(name: str, plain: Mapping[str, Any]) -> str:
    return f"{name}={plain[name]!r}" if name in plain else f"no plain {name}"
