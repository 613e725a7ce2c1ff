"""Values of watched places as they were: what the values of now are compared with.

What `Snapshot.of_slots` keeps of each place, as the values that a graph has as constants. So a
small tensor or a list in the place of an equal one is no change, as it is one in a snapshot before
a call, which has every container as a place of its own.

Tensors are compared by identity and version, functions by identity, lists and dicts item by item,
and dicts of plain values, whose items are watched, by their keys: so a comparison before each step
costs next to nothing.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from merak.core.storages import is_dense
from merak.graph.trace.state.slots import MISSING, PLAIN, is_plain, is_plain_dict

FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, partial)
"""Types of functions that a model may call by the attribute that holds them."""

CONTAINERS = (list, tuple, deque, dict)
"""Types of containers whose items are compared."""

CONSTANT = (
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, Enum, type, set,
    frozenset, types.MethodType,
)  # fmt: skip
"""Types of values beside plain ones that are compared as they are."""

_LARGEST_COPY, _LARGEST_SHOWN = 4096, 16
_MOST_ITEMS, _MAX_DEPTH = 1000, 4


Triangle = tuple[tuple[int, ...], torch.dtype, float, float]
"""Shape and type of matrices that are a triangle, and their values on or below and above it."""


def triangle_of(tensor: Any) -> Triangle | None:
    """What a tensor is, if its matrices have one value above their diagonal and another elsewhere.

    Args:
        tensor: any value; a trained, fake or meta tensor is none.
    """
    if type(tensor) is not torch.Tensor or tensor.requires_grad or not is_dense(tensor):
        return None
    size = tensor.shape[-1] if tensor.ndim > 1 else 0
    if size < 2 or tensor.shape[-2] != size or tensor.is_meta or not tensor.numel():
        return None
    whole = tensor.detach().reshape(-1, size, size)
    first = whole[0, :2, :2].tolist()
    below, above = first[0][0], first[0][1]
    edges = (whole[:, 0, 1:] == above).all() & (whole[:, :, 0] == below).all()
    if below == above or not bool(edges):  # which most matrices fail
        return None
    is_later = torch.ones(size, size, dtype=torch.bool, device=whole.device).triu(1)
    if not bool((whole == torch.where(is_later, above, below).to(whole.dtype)).all()):
        return None
    return tuple(tensor.shape), tensor.dtype, float(below), float(above)


@dataclass(slots=True, eq=False)
class KeptTensor:
    """A tensor as it was.

    Args:
        tensor: the tensor, or one that has been found to be the same.
        version: the number of writes into it, as torch counts them.
        values: a copy, so that a small tensor in its place with equal values is no change; None
            for a large one.
        triangle: what it is, on any device; None for no triangle.
    """

    tensor: torch.Tensor
    version: int
    values: torch.Tensor | None
    triangle: Triangle | None

    def is_same(self, new: Any) -> bool:
        """Whether a value of now is this tensor, or a small one or a triangle that equals it."""
        if new is self.tensor and version(new) == self.version:
            return True
        if self.triangle is not None and triangle_of(new) == self.triangle:
            self.tensor, self.version = new, version(new)
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


@dataclass(frozen=True, slots=True, eq=False)
class KeptItems:
    """A list, tuple, deque or dict as it was.

    Args:
        kind: its type.
        keys: of its items, in their order: numbers where it is no dict.
        values: of its items, as of `kept`; of objects that are neither plain values, tensors,
            functions nor such containers, the type. Empty for very many.
    """

    kind: type
    keys: tuple[Any, ...]
    values: tuple[Any, ...]

    def is_same(self, new: Any) -> bool:
        """Whether a value of now has the same items."""
        if type(new) is not self.kind or len(now := items_of(new)) != len(self.keys):
            return False
        if not self.values:
            return True
        return tuple(now) == self.keys and all(
            type(value) is old if isinstance(old, type) else is_same(old, value)
            for old, value in zip(self.values, now.values(), strict=True)
        )


def items_of(container: Any) -> dict[Any, Any]:
    """Items of a list, tuple, deque or dict, by index or key."""
    return dict(container) if isinstance(container, dict) else dict(enumerate(container))


def _kept_items(container: Any, depth: int) -> KeptItems:
    items = items_of(container)
    is_small = len(items) <= _MOST_ITEMS and depth < _MAX_DEPTH
    values = [
        kept(value, depth + 1)
        if is_plain(value) or type(value) in (torch.Tensor, *FUNCTIONS, *CONTAINERS)
        else type(value)
        for value in items.values()
        if is_small
    ]
    return KeptItems(type(container), tuple(items), tuple(values))


def kept(value: Any, depth: int = 0) -> Any:
    """A value as it is now: of what can be changed in place, a copy or a summary.

    Args:
        value: of now.
        depth: how many containers it is inside of.
    """
    if type(value) is torch.Tensor:
        is_small = value.numel() <= _LARGEST_COPY and not value.is_meta
        copied = value.detach().clone() if is_small else None
        return KeptTensor(value, version(value), copied, triangle_of(value))
    if type(value) is dict and depth == 0 and is_plain_dict(value):
        return KeptKeys(tuple(value))
    if type(value) in CONTAINERS and not is_plain(value):
        return _kept_items(value, depth)
    return type(value)(value) if type(value) in (list, set) else value


def is_same(old: Any, new: Any) -> bool:
    """Whether a value of now is what it was.

    Args:
        old: as of `kept`.
        new: the value of now.
    """
    if isinstance(old, (KeptTensor, KeptItems)):
        return old.is_same(new)
    if type(old) is KeptKeys:
        return type(new) is dict and tuple(new) == old.keys
    return is_equal(old, new)


def is_equal(one: Any, other: Any) -> bool:
    """Whether two attributes are the same object, or equal plain values."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    kind = type(one)  # which is asked in place of the object
    if issubclass(kind, (*PLAIN, *CONSTANT)):
        return bool(one == other or (one != one and other != other))
    if issubclass(kind, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if issubclass(kind, Mapping):
        return list(one) == list(other) and all(is_equal(one[k], other[k]) for k in one)
    if issubclass(kind, (tuple, list)):
        return len(one) == len(other) and all(map(is_equal, one, other))
    if issubclass(kind, partial):
        parts = ((p.func, p.args, p.keywords) for p in (one, other))
        return is_equal(*parts)
    return False


def shown(value: Any) -> str:
    """A value of now, or one that is kept, as text that is the same on every rank."""
    if value is MISSING:
        return "nothing"
    if is_plain(value) or isinstance(value, (torch.dtype, torch.device)):
        return repr(value)
    if isinstance(value, KeptTensor):
        return shown(value.tensor if value.values is None else value.values)
    if isinstance(value, KeptItems):
        return _shown_items(value.kind, value.keys, value.values)
    if isinstance(value, KeptKeys) or is_plain_dict(value):
        return f"the keys {list(value.keys if isinstance(value, KeptKeys) else value)}"
    if isinstance(value, torch.Tensor):
        if value.numel() <= _LARGEST_SHOWN and not value.is_meta:
            return f"tensor({value.tolist()})"
        return f"a tensor of shape {tuple(value.shape)}"
    if type(value) in CONTAINERS and not _is_of_functions(value):
        items = items_of(value)
        return _shown_items(type(value), tuple(items), tuple(items.values()))
    if isinstance(value, tuple):  # of hooks
        return f"({', '.join(map(shown, value))})"
    if isinstance(value, (*FUNCTIONS, nn.Module)):
        return str(getattr(value, "__qualname__", type(value).__name__))
    return type(value).__name__


def _shown_items(kind: type, keys: tuple[Any, ...], values: tuple[Any, ...]) -> str:
    whole = f"a {kind.__name__} of {len(keys)} items"
    if not values or len(keys) > _LARGEST_SHOWN:
        return whole
    named = kind is dict
    parts = [v.__name__ if isinstance(v, type) else shown(v) for v in values]
    parts = [f"{k!r}: {p}" for k, p in zip(keys, parts, strict=True)] if named else parts
    return f"{'{' if named else '['}{', '.join(parts)}{'}' if named else ']'}"


def _is_of_functions(value: Any) -> bool:
    return type(value) is tuple and all(isinstance(item, FUNCTIONS) for item in value)


def version(tensor: torch.Tensor) -> int:
    """The number of writes into a tensor, as torch counts them; -1 where it does not."""
    with torch._C.DisableTorchFunction():  # which a trace has a dozen modes for
        return -1 if tensor.is_inference() else tensor._version
