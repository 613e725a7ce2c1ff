"""Functions that cut a tensor along its first dim, such as at the ends of every expert's rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Cut:
    """Parts of a tensor's first dim that a function takes, and an index along the others.

    Args:
        ends: where each of its parts begins and ends.
        is_one: whether it returns the one part, not a tuple of parts.
        others: what it takes along the other dims, as an index.
    """

    ends: tuple[tuple[int, int], ...]
    is_one: bool = True
    others: tuple[Any, ...] = ()


def cut_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Cut | None:
    """Part that a function, by its name, takes of its first argument; None for other functions."""
    x, *rest = args
    if name in ("__getitem__", "__setitem__"):
        return _indexed(x, rest[0])
    options = {**dict(zip(_NAMES.get(name, ()), rest, strict=False)), **kwargs}
    if not options or options.get("dim", 0) != 0:
        return None
    if name == "narrow":
        start = int(options["start"])
        return Cut(((start, start + int(options["length"])),))
    where = next((options[key] for key in _LISTS if key in options), None)
    if not isinstance(where, (list, tuple)):
        return None
    if name == "tensor_split":
        return Cut(tuple(pairwise((0, *map(int, where), x.shape[0]))), is_one=False)
    return Cut(tuple(pairwise(accumulate(map(int, where), initial=0))), is_one=False)


def _indexed(x: torch.Tensor, index: Any) -> Cut | None:
    first, *others = index if isinstance(index, tuple) else (index,)
    if not isinstance(first, slice) or not x.ndim:
        return None
    start, stop, step = first.indices(x.shape[0])
    return Cut(((start, stop),), others=tuple(others)) if step == 1 else None


_LISTS = ("split_size_or_sections", "split_size", "split_sizes", "indices_or_sections", "indices")
"""Names of the argument that says where a function cuts."""

_NAMES = {
    "narrow": ("dim", "start", "length"),
    "split": ("split_size_or_sections", "dim"),
    "split_with_sizes": ("split_sizes", "dim"),
    "tensor_split": ("indices_or_sections", "dim"),
}
"""Functions that cut, and the names of their arguments."""
