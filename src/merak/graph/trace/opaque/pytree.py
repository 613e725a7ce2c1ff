"""Tensors in nested arguments and results: flattened into slots, and filled in again.

`torch.utils._pytree` would take a dataclass or mapping that nobody has registered, such as the
outputs and caches of plain models, for a leaf, and rebuild a registered one by its constructor,
which may refuse slots. Here containers are copied, and their items exchanged.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import EllipsisType
from typing import Any

import torch
from torch.types import py_sym_types

PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    torch.dtype,
    torch.device,
    torch.memory_format,
    torch.layout,
    Enum,
    slice,
    range,
    EllipsisType,
)


class NotPlain(Exception):
    """A value that is neither a tensor nor plain data; the message is its type."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Placeholder for a tensor in nested values."""

    number: int


def flatten(value: Any) -> tuple[list[Any], Any]:
    """Flatten nested values to their tensors and unknown scalars, with the structure.

    Returns:
        The tensors in order, and the values with a `Slot` in place of each; a tensor that occurs
        twice has one slot.

    Raises:
        NotPlain: a value that is none of tuples, lists, mappings, dataclasses and plain values.
    """
    found: list[Any] = []
    return found, _flattened(value, found, {})


def _flattened(item: Any, found: list[Any], known: dict[int, Slot]) -> Any:
    if isinstance(item, (torch.Tensor, *py_sym_types)):
        if id(item) not in known:
            known[id(item)] = Slot(len(found))
            found.append(item)
        return known[id(item)]
    if isinstance(item, PLAIN):
        return item
    # A closure that named itself would be a cycle, and hold the tensors until it is collected.
    return _rebuilt(item, partial(_flattened, found=found, known=known))


def fill(template: Any, values: Sequence[Any]) -> Any:
    """Fill values into the slots that `flatten` has left."""
    if isinstance(template, Slot):
        return values[template.number]
    if isinstance(template, PLAIN):
        return template
    return _rebuilt(template, partial(fill, values=values))


def _rebuilt(value: Any, walk: Callable[[Any], Any]) -> Any:
    """The same container, with `walk` applied to its items."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(walk(item) for item in value))
    if isinstance(value, (tuple, list)):
        items = [walk(item) for item in value]
        return type(value)(items) if type(value) is not torch.Size else tuple(items)
    if isinstance(value, Mapping):
        return _mapping(value, {key: walk(item) for key, item in value.items()})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(made, field.name, walk(getattr(value, field.name)))
        return made
    raise NotPlain(type(value).__name__)


def _mapping(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return items
    made: Any = copy.copy(value)
    for key, item in items.items():
        made[key] = item
    return made
