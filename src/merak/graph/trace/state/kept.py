"""Values of watched places as they were: what the values of now are compared with.

Tensors are compared by identity and version, functions by identity, dicts by their keys: so a
comparison before each step costs next to nothing.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from merak.graph.trace.state.slots import MISSING, is_plain

FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, partial)
"""Types of functions that a model may call by the attribute that holds them."""

_LARGEST_COPY, _LARGEST_SHOWN = 4096, 16


@dataclass(frozen=True, slots=True, eq=False)
class KeptTensor:
    """A tensor as it was.

    Args:
        tensor: the tensor.
        version: the number of writes into it, as torch counts them.
        values: a copy, so that a small tensor in its place with equal values is no change; None
            for a large one.
    """

    tensor: torch.Tensor
    version: int
    values: torch.Tensor | None

    def is_same(self, new: Any) -> bool:
        """Whether a value of now is this tensor, or a small one that equals it."""
        if new is self.tensor and version(new) == self.version:
            return True
        old = self.values
        if old is None or type(new) is not torch.Tensor or new.is_meta:
            return False
        kinds = [(t.shape, t.dtype, t.device) for t in (old, new)]
        is_trained = self.tensor.requires_grad != new.requires_grad
        return kinds[0] == kinds[1] and not is_trained and torch.equal(old, new)


@dataclass(frozen=True, slots=True, eq=False)
class KeptKeys:
    """The keys that a dict had.

    Args:
        keys: in their order.
    """

    keys: tuple[Any, ...]


def kept(value: Any) -> Any:
    """A value as it is now: of what can be changed in place, a copy or a summary."""
    if type(value) is torch.Tensor:
        is_small = value.numel() <= _LARGEST_COPY and not value.is_meta
        copied = value.detach().clone() if is_small else None
        return KeptTensor(value, version(value), copied)
    if type(value) is dict:
        return KeptKeys(tuple(value))
    return list(value) if type(value) is list else value


def is_same(old: Any, new: Any) -> bool:
    """Whether a value of now is what it was.

    Args:
        old: as of `kept`.
        new: the value of now.
    """
    if type(old) is KeptTensor:
        return old.is_same(new)
    if type(old) is KeptKeys:
        return type(new) is dict and tuple(new) == old.keys
    return old is new or not differs(old, new)


def differs(old: Any, new: Any) -> bool:
    """Whether two values differ; two tensors do unless they are one."""
    if old is new:
        return False
    if type(old) is not type(new) or isinstance(old, torch.Tensor):
        return True
    try:
        return not (bool(old == new) or (old != old and new != new))
    except Exception:  # of an object that cannot be compared
        return True


def shown(value: Any) -> str:
    """A value of now, or one that is kept, as text that is the same on every rank."""
    if value is MISSING:
        return "nothing"
    if is_plain(value):
        return repr(value)
    if isinstance(value, KeptTensor):
        return shown(value.tensor if value.values is None else value.values)
    if isinstance(value, (KeptKeys, dict)):
        return f"the keys {list(value.keys if isinstance(value, KeptKeys) else value)}"
    if isinstance(value, torch.Tensor):
        if value.numel() <= _LARGEST_SHOWN and not value.is_meta:
            return f"tensor({value.tolist()})"
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple):  # of hooks
        return f"({', '.join(map(shown, value))})"
    if isinstance(value, (*FUNCTIONS, nn.Module)):
        return str(getattr(value, "__qualname__", type(value).__name__))
    return type(value).__name__


def version(tensor: torch.Tensor) -> int:
    """The number of writes into a tensor, as torch counts them; -1 where it does not."""
    return -1 if tensor.is_inference() else tensor._version
