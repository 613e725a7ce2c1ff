"""Meanings of tensors while a module that loops over experts is followed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from merak.graph.trace.opaque.experts.steps import Result, Weight


@dataclass(frozen=True, slots=True)
class Input:
    """A whole tensor, (tokens, *tail); with a dim of one in front where `is_led`."""

    place: int
    tail: tuple[int, ...]
    is_led: bool = False


@dataclass(frozen=True, slots=True)
class Stack:
    """A parameter, in some shape, which may be a stack of all experts' weights."""

    number: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Own:
    """Meaning of a tensor: one expert's own weight."""

    expert: int
    weight: Weight


@dataclass(frozen=True, slots=True)
class Row:
    """Meaning of a tensor: the result of a step for one expert's rows."""

    expert: int
    result: Result
    is_led: bool = False


@dataclass(frozen=True, slots=True)
class Noise:
    """Meaning of a tensor: the mask that dropout multiplies rows by.

    Args:
        row: the rows.
        kept: the fraction that it keeps; None before it is drawn.
    """

    row: Row
    kept: float | None = None


@dataclass(frozen=True, slots=True)
class Sum:
    """The tensor that rows are added to, or put into."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of the experts' sum that come from one expert.

    Args:
        expert: whose they are.
        at: numbers of these rows, as a step gives them; None for those of the expert's tokens.
        row: the expert's own rows, once these are added.
    """

    expert: int
    at: Result | None = None
    row: Row | None = None


Meaning = Input | Stack | Own | Row | Noise | Sum | Part


def is_same_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors, which may have no values, are views of the same memory."""
    return bool(tensor.untyped_storage()._cdata == other.untyped_storage()._cdata)


def without_mask(index: Any) -> Any:
    """An index as it is, but for a mask of rows, in whose place come their numbers."""
    is_mask = isinstance(index, torch.Tensor) and index.dtype is torch.bool and index.ndim == 1
    return index.nonzero()[:, 0] if is_mask else index
