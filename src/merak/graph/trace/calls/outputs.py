"""A model's outputs as a flat dict of named tensors, and back."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from transformers.utils.generic import ModelOutput

LOSS = "loss"

_POSITION = re.compile(r"output\d+$")
"""Names of the parts of a tuple."""

_BETWEEN = re.compile(r"(?<!\\)\.")
"""Separator of a tensor's name from those of the tuples and dicts that it is in."""


def named_outputs(result: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over the tensors in a model's result, with their names.

    A tensor in a dict or dataclass has its key or field as name, one in a tuple its position
    (`output1`), and a nested one a path of these (`hidden_states.output0`). A tuple's first tensor
    is its loss where it is a scalar, as transformers has it; so is a bare scalar tensor.

    Args:
        result: a tensor; or a dict, dataclass or tuple, of which the tensors, also those of dicts
            and tuples inside, are taken.
    """
    if isinstance(result, torch.Tensor):
        yield (LOSS if result.ndim == 0 else "output"), result
        return
    for number, (name, value) in enumerate(_parts(result)):
        is_loss = number == 0 and name == "output0" and _is_scalar(value)
        yield from _inside(LOSS if is_loss else name, value)


def _inside(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, (tuple, list, Mapping)):
        for inner, part in _parts(value):
            yield from _inside(f"{name}.{inner}", part)


def _parts(result: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(result, Mapping):
        return [(_escaped(str(name)), value) for name, value in result.items()]
    if isinstance(result, (tuple, list)):
        return [(f"output{i}", value) for i, value in enumerate(result)]
    names = getattr(result, "__dataclass_fields__", ())
    return [(name, getattr(result, name)) for name in names]


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 0


def _escaped(name: str) -> str:
    return name.replace(".", r"\.")


def nested(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Rebuild nested outputs from flat names: the reverse of `named_outputs`.

    Args:
        outputs: by the names of `named_outputs`.

    Returns:
        Values by the first part of the name; `hidden_states.output0`, … become one tuple. Nested
        dicts are `ModelOutput`s of transformers, with attributes of the same names.
    """
    found: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    for name, value in outputs.items():
        first, *rest = _BETWEEN.split(name, maxsplit=1)
        own = first.replace(r"\.", ".")
        if rest:
            found[own] = inner.setdefault(own, {})
            inner[own][rest[0]] = value
        else:
            found[own] = value
    return found | {name: _rebuilt(nested(parts)) for name, parts in inner.items()}


def _rebuilt(parts: dict[str, Any]) -> Any:
    is_tuple = all(_POSITION.match(name) for name in parts)
    return tuple(parts.values()) if is_tuple else ModelOutput(parts)
