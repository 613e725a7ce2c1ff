"""Metadata of tensors: shape, type and whether a gradient flows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Metadata of a tensor, without its values.

    Args:
        shape: sizes of its dims.
        dtype: its element type.
        requires_grad: whether a gradient flows through it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor, if contiguous."""
        return math.prod(self.shape) * self.dtype.itemsize


Signature = tuple[tuple[str, TensorMeta], ...]
"""The columns of a microbatch and what each is, in a fixed order."""


def largest_shape(columns: Signature) -> tuple[int, ...]:
    """Return the shape of the largest column, which tells more of a microbatch than labels may.

    Args:
        columns: of a microbatch.
    """
    shapes = [tuple(map(int, meta.shape)) for _, meta in columns if meta.shape]
    return max(shapes, key=math.prod, default=())


def requires_grad(meta: Any) -> bool:
    """Tell whether a gradient flows through a node with this metadata."""
    if isinstance(meta, TensorMeta):
        return meta.requires_grad
    return isinstance(meta, tuple) and any(requires_grad(m) for m in meta)
