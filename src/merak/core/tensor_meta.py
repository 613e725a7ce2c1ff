"""The shape, type and gradient of a tensor that is not there."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """A tensor without its numbers.

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
        """Bytes of the tensor, laid out densely."""
        return math.prod(self.shape) * self.dtype.itemsize


Signature = tuple[tuple[str, TensorMeta], ...]
"""The columns of a microbatch and what each is, in a fixed order."""


def requires_grad(meta: Any) -> bool:
    """Whether a gradient flows through a node with this meta."""
    if isinstance(meta, TensorMeta):
        return meta.requires_grad
    return isinstance(meta, tuple) and any(requires_grad(m) for m in meta)
