"""Values of files and their type hints: what fits, as JSON schema too, and objects made of JSON."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from enum import Enum
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, Literal, TypeVar

Data = TypeVar("Data")


def fits(value: object, hint: Any) -> bool:
    """Whether a value is of a type, as far as that can be told without looking into mappings.

    A whole number is a number, true and false are none.

    Args:
        value: as a file or an argument has it.
        hint: a type, a union, a literal, or a container's hint.
    """
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        return any(fits(value, option) for option in typing.get_args(hint))
    if origin is Literal:
        return value in typing.get_args(hint)
    kind = origin or hint
    if kind is Any or not isinstance(kind, type):
        return True
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    if kind in (list, tuple):
        each = typing.get_args(hint)[:1] if kind is list else ()
        if not isinstance(value, (list, tuple)):
            return False
        return all(fits(own, inner) for inner in each for own in value)
    if kind is dict:
        return isinstance(value, Mapping)
    return isinstance(value, kind)


def kind_names(hint: Any, words: Mapping[Any, str] = MappingProxyType({})) -> list[str]:
    """What a value of a type is called in messages, each of a union's once, and none last.

    Args:
        hint: as of `fits`.
        words: for types that are not called as in a file.
    """
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        options = sorted(typing.get_args(hint), key=lambda option: option is type(None))
        return list(dict.fromkeys(n for option in options for n in kind_names(option, words)))
    if origin is Literal:
        return [repr(choice) for choice in typing.get_args(hint)]
    kind, inner = origin or hint, typing.get_args(hint)
    if dataclasses.is_dataclass(kind):
        return ["named fields"]
    if kind is list and inner and inner[0] is not Any:
        each = [f"{name.removeprefix('a ')}s" for name in kind_names(inner[0], words)]
        return [f"a list of {' or '.join(each)}"]
    return [{**_KINDS, **words}.get(kind, str(getattr(kind, "__name__", kind)))]


_KINDS: Mapping[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
    tuple: "a list",
    dict: "named fields",
    Mapping: "named fields",
    type(None): "null",
}
"""What a field should be, by its type."""


def json_schema(hint: Any) -> dict[str, Any]:
    """JSON schema of the values that are of a type; empty, so that any is, for one of no file.

    Args:
        hint: as of `fits`.
    """
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        options = [json_schema(option) for option in inner]
        if all(set(option) == {"type"} for option in options):
            return {"type": [option["type"] for option in options]}
        return {} if {} in options else {"anyOf": options}
    if origin is Literal:
        return {"enum": list(inner)}
    kind = origin or hint
    if isinstance(kind, type) and issubclass(kind, Enum):
        return {"enum": [choice.value for choice in kind]}
    if kind not in _JSON_TYPES:
        return {}
    found: dict[str, Any] = {"type": _JSON_TYPES[kind]}
    if kind is list and inner and (each := json_schema(inner[0])):
        found["items"] = each
    if kind in (dict, Mapping) and inner and (each := json_schema(inner[1])):
        found["additionalProperties"] = each
    return found


_JSON_TYPES: Mapping[Any, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    tuple: "array",
    dict: "object",
    Mapping: "object",
    type(None): "null",
}


def from_fields(kind: type[Data], value: object, name: str = "") -> Data:
    """Make a dataclass of a JSON object, and check the types of all that is in it.

    Args:
        kind: the dataclass. Fields that it does not have are left; lists become tuples.
        value: the object.
        name: what it is called in messages; empty for the whole.

    Raises:
        ValueError: it is no object, lacks a field, or has one of another type.
        OverflowError: a number is too large.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"{name or 'it'} is {_short(value)}, not named fields")
    hints, found = typing.get_type_hints(kind), {}
    for part in dataclasses.fields(kind):  # type: ignore[arg-type]
        place = f"{name}.{part.name}" if name else part.name
        if part.name in value:
            found[part.name] = _converted(value[part.name], hints[part.name], place)
        elif part.default is part.default_factory is dataclasses.MISSING:
            raise ValueError(f"{place} is missing")
    return kind(**found)


def _converted(value: Any, hint: Any, name: str) -> Any:
    """A JSON value as a type hint has it: tuples for lists, dataclasses for objects."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union) and type(None) in inner:
        rest = [own for own in inner if own is not type(None)]
        return value if value is None or len(rest) > 1 else _converted(value, rest[0], name)
    if origin is tuple and isinstance(value, (list, tuple)):
        kinds = inner[:1] * len(value) if inner[1:] == (...,) else inner
        if len(kinds) != len(value):
            raise ValueError(f"{name} has {len(value)} values, not {len(kinds)}")
        pairs = enumerate(zip(value, kinds))
        return tuple(_converted(own, kind, f"{name}[{index}]") for index, (own, kind) in pairs)
    if fits(value, hint) and isinstance(value, dict) and inner:
        return {key: _converted(own, inner[1], f"{name}.{key}") for key, own in value.items()}
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return from_fields(typing.cast("type[Any]", hint), value, name)
    if not fits(value, hint):
        raise ValueError(f"{name} is {_short(value)}, not {' or '.join(kind_names(hint))}")
    return float(value) if hint is float else value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:39]}…"
