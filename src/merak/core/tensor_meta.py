"""Metadata of tensors: shape, type and whether a gradient flows."""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Any

import torch

IGNORED_LABEL = -100
"""The label of a token that is not to be predicted, in transformers as in torch."""


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Metadata of a tensor, without its values.

    Args:
        shape: sizes of its dims.
        dtype: its element type.
        requires_grad: whether a gradient flows through it.
        ones: of a column of the batch, whether all elements are known to be one.
        ignored: of one that is known to be ones and then zeros in each row, the columns that have
            `IGNORED_LABEL` wherever it is zero.
        documents: of positions that begin anew with each document of a row, and of an attention
            mask that causality and such positions alone make: room for the documents of all rows;
            0 where their number is not known.
        is_sparse: whether it is not strided, so that it cannot be sliced.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    ones: bool = False
    ignored: tuple[str, ...] = ()
    documents: int = 0
    is_sparse: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor, if contiguous."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def may_be_ones(self) -> bool:
        """Whether it may be a mask of tokens, of which it is of use to know that it is all ones."""
        is_number = self.dtype.is_floating_point or self.dtype.is_complex
        return len(self.shape) > 1 and not is_number


Signature = tuple[tuple[str, TensorMeta], ...]
"""The columns of a microbatch and what each is, in a fixed order."""


def known_masks(
    columns: Signature, names: Container[str] = (), padded: Container[str] = ()
) -> Signature:
    """Columns of which no more is known than asked for.

    Args:
        columns: of a microbatch.
        names: of those that may be known to be ones.
        padded: of those that may be known to be ones and then zeros, where not to be ones alone,
            or to be positions of documents.
    """

    def known(name: str, meta: TensorMeta) -> TensorMeta:
        ones = meta.ones and name in names
        may_end = name in padded
        return replace(
            meta,
            ones=ones,
            ignored=meta.ignored if may_end and not ones else (),
            documents=meta.documents if may_end else 0,
        )

    return tuple((name, known(name, meta)) for name, meta in columns)


def largest_shape(columns: Signature) -> tuple[int, ...]:
    """Return the shape of the largest column, which tells more of a microbatch than labels may.

    Args:
        columns: of a microbatch.
    """
    shapes = [tuple(map(int, meta.shape)) for _, meta in columns if meta.shape]
    return max(shapes, key=math.prod, default=())


def requires_grad(meta: Any) -> bool:
    """Whether a gradient flows through a node with this metadata."""
    if isinstance(meta, TensorMeta):
        return meta.requires_grad
    return isinstance(meta, tuple) and any(requires_grad(m) for m in meta)
