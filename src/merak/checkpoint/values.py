"""Small values of a checkpoint (learning rates, counters, the schedule's state) as plain JSON.

Numbers, text, lists and so on come back as they were, to the last bit and with their types; reading
them runs no code.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import torch

from merak.core.errors import WeightsError

PLAIN = (bool, int, str, type(None))
"""Types that JSON has, with every value they take."""

MAX_TENSOR_BYTES = 2**20
"""Largest tensor that is a small value; others belong in a file of tensors."""


def pack_value(value: object, what: str) -> Any:
    """Pack a value as JSON.

    Args:
        value: numbers, text, None, tensors of at most a megabyte, dtypes, and lists, tuples, sets
            and dicts of these.
        what: its place, for the error.

    Raises:
        WeightsError: a value of another type.
    """
    if type(value) in PLAIN or (type(value) is float and math.isfinite(value)):
        return value
    if type(value) is float:
        return {"float": str(value)}
    if isinstance(value, torch.Tensor):
        return {"tensor": _pack_tensor(value, what)}
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if type(value) is list:
        return [pack_value(one, what) for one in value]
    if type(value) in (tuple, set):
        return {type(value).__name__: [pack_value(one, what) for one in value]}  # type: ignore[attr-defined]
    if isinstance(value, Mapping):
        pairs = ((pack_value(k, what), pack_value(v, f"{what}[{k!r}]")) for k, v in value.items())
        return {"dict": [list(pair) for pair in pairs]}
    if isinstance(value, Enum):
        return pack_value(value.value, what)
    if hasattr(value, "item"):  # a number of numpy's
        return pack_value(value.item(), what)
    raise WeightsError(
        f"{what} is of type {type(value).__name__}, which a checkpoint cannot hold; keep numbers, "
        "text, tensors, and lists and dicts of these there."
    )


def unpack_value(packed: Any) -> Any:
    """Unpack a value that `pack_value` made.

    Raises:
        ValueError: it is none.
    """
    if isinstance(packed, list):
        return [unpack_value(one) for one in packed]
    if not isinstance(packed, dict):
        return packed
    if len(packed) != 1 or next(iter(packed)) not in _UNPACK:
        raise ValueError(f"{str(packed)[:60]} is no packed value")
    ((kind, inner),) = packed.items()
    return _UNPACK[kind](inner)


def dtype_name(dtype: torch.dtype) -> str:
    """Format a dtype without torch's prefix."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Look a dtype up by its name.

    Raises:
        ValueError: torch has none of that name.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return found


def _pack_tensor(value: torch.Tensor, what: str) -> dict[str, Any]:
    if value.nbytes > MAX_TENSOR_BYTES:
        raise WeightsError(
            f"{what} holds a tensor of {value.nbytes:,} bytes, where a checkpoint has room for "
            "small values; keep it as a buffer of the model."
        )
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return {
        "dtype": dtype_name(value.dtype),
        "shape": list(value.shape),
        "base64": base64.b64encode(flat.numpy().tobytes()).decode(),
    }


def _unpack_tensor(packed: Mapping[str, Any]) -> torch.Tensor:
    data = bytearray(base64.b64decode(packed["base64"]))
    if not data:
        return torch.empty(packed["shape"], dtype=dtype_of(packed["dtype"]))
    flat = torch.frombuffer(data, dtype=torch.uint8)
    return flat.view(dtype_of(packed["dtype"])).reshape(packed["shape"])


_UNPACK: Mapping[str, Callable[[Any], Any]] = {
    "float": float,
    "dtype": dtype_of,
    "tensor": _unpack_tensor,
    "tuple": lambda inner: tuple(unpack_value(inner)),
    "set": lambda inner: set(unpack_value(inner)),
    "dict": lambda inner: {unpack_value(key): unpack_value(value) for key, value in inner},
}
