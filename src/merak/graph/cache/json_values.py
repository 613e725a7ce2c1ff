"""JSON of a graph's values: written as data, and read back without running any code.

Lists in JSON are tuples; whatever is neither that nor a plain number, text, boolean or None is an
object with one key, which says how to read it. Classes are found by name among those this process
has imported already, and only if they hold data alone: enums, named tuples and dataclasses. Their
fields are set as they were; no constructor runs.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch

from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.serialize import Ref
from merak.graph.trace.opaque.operator import ModuleRef

_PLAIN = (type(None), bool, int, float, str)
_TORCH = (torch.dtype, torch.layout, torch.memory_format)
_MAPPINGS = (dict, OrderedDict)


class NotStorable(TypeError):
    """Value that is no plain data; the message is its type."""


class Writer:
    """Writer of values as JSON; tensors and repeated values go into tables of their own.

    Attributes:
        tensors: those that values hold, in order; written apart from the JSON.
        metas: every `TensorMeta`, once, as JSON.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.metas: list[Any] = []
        self._tensor_places: dict[int, int] = {}
        self._meta_places: dict[TensorMeta, int] = {}

    def write(self, value: Any) -> Any:
        """Write a value of a trace as JSON.

        Raises:
            NotStorable: it holds an object that is no data.
        """
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is tuple or kind is torch.Size:
            return [self.write(item) for item in value]
        if kind is TensorMeta:
            return {"meta": self._meta(value)}
        if kind is Ref:
            return {"node": value.place}
        if isinstance(value, Enum):
            return {"enum": self._member(value)}
        if isinstance(value, list):
            return {"list": [self.write(item) for item in value]}
        if isinstance(value, _MAPPINGS) and (kind in _MAPPINGS or _is_fx(kind)):
            pairs = [[self.write(k), self.write(v)] for k, v in value.items()]
            return {"ordered" if kind is OrderedDict else "dict": pairs}
        return self._write_rare(value)

    def _write_rare(self, value: Any) -> Any:
        if isinstance(value, _TORCH):
            return {"torch": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if isinstance(value, torch.Tensor):
            return {"tensor": self._tensor(value)}
        if isinstance(value, (slice, range)):
            parts = (value.start, value.stop, value.step)
            return {type(value).__name__: [self.write(part) for part in parts]}
        if isinstance(value, complex):
            return {"complex": [value.real, value.imag]}
        if type(value) in (set, frozenset):
            return {type(value).__name__: sorted((self.write(v) for v in value), key=repr)}
        if isinstance(value, ModuleRef):
            return {"place": value.path}
        return self._write_object(value)

    def _write_object(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return {"named": [_name_of(kind), [self.write(item) for item in value]]}
        items = None
        if isinstance(value, dict):  # such as transformers' outputs, which are dataclasses too
            items = [[self.write(k), self.write(v)] for k, v in value.items()]
        if dataclasses.is_dataclass(value) and _is_data(kind):
            names = [f.name for f in dataclasses.fields(value)]
            held = [[name, self.write(getattr(value, name))] for name in names]
            return {"data": [_name_of(kind), held, items]}
        raise NotStorable(f"{kind.__module__}.{kind.__qualname__}")

    def _member(self, value: Enum) -> list[Any]:
        if type(value).__members__.get(value.name) is not value:  # flags that are combined
            raise NotStorable(repr(value))
        return [_name_of(type(value)), value.name]

    def _meta(self, meta: TensorMeta) -> int:
        if meta not in self._meta_places:
            self._meta_places[meta] = len(self.metas)
            fields = (getattr(meta, field.name) for field in dataclasses.fields(meta))
            self.metas.append([self.write(field) for field in fields])
        return self._meta_places[meta]

    def _tensor(self, tensor: torch.Tensor) -> int:
        if id(tensor) not in self._tensor_places:
            self._tensor_places[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return self._tensor_places[id(tensor)]


class Reader:
    """Reader of the JSON that a `Writer` wrote.

    Args:
        tensors: as the writer collected them.
        metas: likewise.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], metas: Sequence[Any]) -> None:
        self._tensors = tensors
        self._readers: dict[str, Callable[[Any], Any]] = {
            "node": Ref,
            "meta": self._meta,
            "list": lambda items: [self.read(item) for item in items],
            "dict": self._pairs,
            "ordered": lambda pairs: OrderedDict(self._pairs(pairs)),
            "tensor": lambda place: self._tensors[place],
            "torch": _torch_constant,
            "device": torch.device,
            "slice": lambda parts: slice(*self.read(parts)),
            "range": lambda parts: range(*self.read(parts)),
            "complex": lambda parts: complex(*parts),
            "set": lambda items: set(self.read(items)),
            "frozenset": lambda items: frozenset(self.read(items)),
            "place": ModuleRef,
            "enum": lambda held: _found_class(held[0], _is_enum)[held[1]],
            "named": lambda held: tuple.__new__(
                _found_class(held[0], _is_named_tuple), self.read(held[1])
            ),
            "data": self._data,
        }
        self._metas: list[TensorMeta] = []
        self._metas += [TensorMeta(*self.read(meta)) for meta in metas]

    def read(self, value: Any) -> Any:
        """Value that was written as this JSON.

        Raises:
            ValueError, KeyError: no writer has written it, or its classes are not here.
        """
        if type(value) is list:
            return tuple([self.read(item) for item in value])
        if type(value) is dict:
            ((kind, held),) = value.items()
            return self._readers[kind](held)
        return value

    def _meta(self, place: int) -> TensorMeta:
        return self._metas[place]

    def _pairs(self, pairs: Any) -> dict[Any, Any]:
        return {self.read(key): self.read(value) for key, value in pairs}

    def _data(self, held: Any) -> Any:
        name, fields, items = held
        kind = _found_class(name, _is_data)
        if [field.name for field in dataclasses.fields(kind)] != [field for field, _ in fields]:
            raise ValueError(f"{name} has other fields now")
        if items is None:
            made = object.__new__(kind)
        else:
            made = kind.__new__(kind)
            base: Any = OrderedDict if issubclass(kind, OrderedDict) else dict
            for key, value in items:
                base.__setitem__(made, self.read(key), self.read(value))
        for field, value in fields:
            object.__setattr__(made, field, self.read(value))
        return made


def _is_fx(kind: type) -> bool:
    return kind.__module__.startswith("torch.fx.")


def _torch_constant(name: str) -> Any:
    found = getattr(torch, name)
    if not isinstance(found, _TORCH):
        raise ValueError(f"torch.{name} is no type, layout or memory format")
    return found


def _name_of(kind: type) -> str:
    """Qualified name of a class, if the class is found again by it.

    Raises:
        NotStorable: it is not, as of one that is defined in a function.
    """
    name = f"{kind.__module__}:{kind.__qualname__}"
    try:
        _found_class(name, lambda found: found is kind)
    except (ValueError, KeyError) as error:
        raise NotStorable(f"{kind.__module__}.{kind.__qualname__}") from error
    return name


def _found_class(name: str, fits: Callable[[Any], bool]) -> Any:
    module, _, path = name.partition(":")
    found: Any = sys.modules[module]
    for part in path.split("."):
        found = vars(found).get(part)
        if found is None:
            raise ValueError(f"{name} is not there")
    if not (isinstance(found, type) and fits(found)):
        raise ValueError(f"{name} is no class that holds data alone")
    return found


def _is_enum(kind: Any) -> bool:
    return issubclass(kind, Enum)


def _is_named_tuple(kind: Any) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def _is_data(kind: Any) -> bool:
    is_plain = kind.__new__ is object.__new__ or issubclass(kind, dict)
    return dataclasses.is_dataclass(kind) and is_plain and not hasattr(kind, "__del__")
