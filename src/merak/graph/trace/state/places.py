"""Places of Python state: what holds values, what it held, and what has changed there since."""

from __future__ import annotations

import random
import types
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import length_hint
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from merak.graph.trace.state.holders import closure, slot_names
from merak.graph.trace.state.kept import is_same
from merak.graph.trace.state.modules import Code
from merak.graph.trace.state.outside import Outside
from merak.graph.trace.state.slots import MISSING, Slot, is_plain
from merak.graph.weights.empty_weights import ORIGIN_ATTRIBUTE

with FakeTensorMode():
    _OF_TENSORS = (*vars(torch.empty(0)), "_is_param", ORIGIN_ATTRIBUTE)
_OF_TORCH = frozenset((*vars(nn.Module()), *_OF_TENSORS, "_flat_weights")) - {"training"}
"""Attributes that torch or Merak keeps itself; a forward changes none of them but hooks."""
_SEQUENCES = (list, deque, bytearray, array)
CONTAINER_KINDS = (*_SEQUENCES, dict, set)
"""Types of containers whose items are looked at; subclasses count as these."""


class Slots:
    """Kind of a place that keeps attributes in slots."""


class Parts:
    """Kind of a place that keeps submodules, parameters, or buffers, of which the names count."""


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Owner of values by key, such as an object or a dict, with a copy of what it held.

    Args:
        label: as people write it.
        owner: attributes of an object, a container, an array, or the slot of a variable.
        items: the values that it held, by name, index or key; of a set, by themselves.
        kind: type of the owner; `Slot` for a global, `object` for an object's attributes, `type`
            for a class's, a function's for the variables of its closure, a tensor's for what is
            written into it, `Iterator` for one or a generator of random numbers, `Code` for a
            module's code, `Outside` for what is outside of the model.
        root: as of `StateRead`.
        attribute: identity of the attributes of the object that has it, and its name there.
        source: the line that reads it, where that is known beforehand.
        glance: whether it seems to hold what it held, in a microsecond; None where nothing tells.
    """

    label: str
    owner: Any
    items: Mapping[Any, Any]
    kind: type
    root: str
    attribute: tuple[int, str] | None = None
    source: str = ""
    glance: Callable[[], bool] | None = None

    def now(self) -> dict[Any, Any]:
        """Values that the place holds now, by name, index or key."""
        return held_items(self.owner, self.kind)

    def changes(self) -> Iterator[StateLeft]:
        """Changes of the place: values that are new, other, or gone."""
        try:
            now = self.now()
            keys = dict.fromkeys((*self.items, *now))
        except Exception:  # of objects' own code, such as `__hash__`: these are not looked at
            return
        for key in keys:
            old, new = self.items.get(key, MISSING), now.get(key, MISSING)
            if (self.kind is Iterator and new is None) or not _is_equal(old, new):
                yield StateLeft(self, key, old, new)

    def restore(self) -> None:
        """Restore the values that it held; an iterator goes on from where it is."""
        with suppress(Exception):  # of objects' own code: these are not looked at
            self._restore()

    def _restore(self) -> None:
        now = self.now() if self.kind is not Iterator else self.items
        if list(now) == list(self.items) and all(now[k] is v for k, v in self.items.items()):
            return
        if self.kind is Slot:
            self.owner.set(self.items[""])
        elif self.kind is types.FunctionType:
            for name, cell in _cells(self.owner).items():
                cell.cell_contents = self.items[name]
        elif self.kind is np.ndarray:
            self.owner[...] = self.items[""]
        elif self.kind is Parts:
            own = {**self.owner, **{k: v for k, v in self.items.items() if v is not Parts}}
            _refill(self.owner, {name: own[name] for name in self.items if name in own})
        elif self.kind is Outside:
            for left in self.changes():
                self.owner.put(left.key, left.old)
        elif self.kind in (object, type, Slots):
            delete, put = (partial(f, self.owner) for f in (delattr, setattr))
            if self.kind is object:  # past the object's own code
                delete, put = self.owner.__delitem__, self.owner.__setitem__
            for name in now.keys() - self.items.keys():
                delete(name)
            for name, value in self.items.items():
                put(name, value)
        else:
            _refill(self.owner, self.items.values() if self.kind is not dict else self.items)


@dataclass(frozen=True, slots=True, eq=False)
class StateLeft:
    """A value that a call of a model has left in a place.

    Args:
        place: where.
        key: as of the place's items.
        old: what was there before; `MISSING` for nothing.
        new: what is there now.
    """

    place: Place
    key: Any
    old: Any
    new: Any

    @property
    def attribute(self) -> tuple[int, str] | None:
        """The identity of an object's attributes and a name there, where it is or is inside of."""
        own = self.place
        if own.kind is Parts and own.attribute is not None:
            return own.attribute[0], self.key
        return (id(own.owner), self.key) if own.kind is object else own.attribute

    @property
    def inside(self) -> str:
        """The place in the model that the snapshot is of, as people write it."""
        return str(self).removeprefix("model.")

    def put(self, value: Any) -> None:
        """Set the attribute or item, past the object's own code; remove it for `MISSING`."""
        if value is MISSING:
            self.place.owner.pop(self.key, None)
        else:
            self.place.owner[self.key] = value

    def __str__(self) -> str:
        """The place, as people write it."""
        own = self.place
        if own.kind is Outside:
            return str(own.owner.label(self.key))
        is_added = own.kind in _SEQUENCES and (self.old is MISSING or self.new is MISSING)
        if is_added or own.kind in (Slot, set, torch.Tensor, np.ndarray, Iterator):
            return own.label
        is_item = own.kind in (*_SEQUENCES, dict)
        return f"{own.label}[{self.key!r}]" if is_item else f"{own.label}.{self.key}"


def _is_equal(old: Any, new: Any) -> bool:
    try:
        return is_same(old, new)
    except Exception:  # of objects' own code
        return True


def held_items(owner: Any, kind: Any) -> dict[Any, Any]:
    """Values that an owner of state holds now, by name, index or key.

    Args:
        owner: as of `Place`.
        kind: as of `Place`.
    """
    if kind is Slot:
        return {"": owner.get()}
    if kind is Iterator:
        return {"": _position(owner)}
    if kind is np.ndarray:
        return {"": owner.copy()}
    if kind is Slots:
        return {n: getattr(owner, n) for n in slot_names(type(owner).__mro__) if hasattr(owner, n)}
    if kind in (Code, Outside):
        return dict(owner.now())
    if kind is Parts:
        whole = (nn.Module, nn.Parameter, type(None))
        return {k: held if isinstance(held, whole) else Parts for k, held in owner.items()}
    if kind is object:
        return {name: value for name, value in owner.items() if name not in _OF_TORCH}
    if kind is type:
        return {n: v for n, v in vars(owner).items() if n[:2] != "__" and _is_data(v)}
    if kind is types.FunctionType:
        return {name: cell.cell_contents for name, cell in _cells(owner).items()}
    if kind is set:
        return {item: item for item in owner}
    return dict(owner) if kind is dict else dict(enumerate(owner))


def _position(iterator: Any) -> Any:
    """What tells whether an iterator or a generator of random numbers has gone on; None if none."""
    if isinstance(iterator, np.random.Generator):
        return iterator.bit_generator.state
    if isinstance(iterator, np.random.RandomState):
        return iterator.get_state(legacy=False)
    if isinstance(iterator, random.Random):
        return iterator.getstate()
    return length_hint(iterator) if hasattr(iterator, "__length_hint__") else None


def _cells(function: types.FunctionType) -> dict[str, types.CellType]:
    """Filled cells of a function's closure, by name."""
    names, filled = function.__code__.co_freevars, closure(function)
    cells = dict(zip(names, function.__closure__ or (), strict=True))
    return {name: cell for name, cell in cells.items() if name in filled}


def _is_data(value: Any) -> bool:
    """Whether an attribute of a class is a value: a number, a tensor, a list and the like."""
    return is_plain(value) or issubclass(type(value), (*CONTAINER_KINDS, tuple, torch.Tensor))


def _refill(container: Any, items: Any) -> None:
    if isinstance(container, (bytearray, array)):  # others may have views of it
        kind: Any = (
            bytes if isinstance(container, bytearray) else partial(array, container.typecode)
        )
        container[:] = kind(items)
        return
    container.clear()
    container.update(items) if isinstance(container, (dict, set)) else container.extend(items)
