"""Shapes of microbatches of any size, from a job's first samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from merak.core.tensor_meta import Signature, TensorMeta


@dataclass(frozen=True, slots=True)
class Samples:
    """Columns of a batch, of which any number of samples can be had.

    Args:
        columns: of the batch.
        count: its samples.
    """

    columns: Signature
    count: int

    def of(self, microbatch: int) -> Signature:
        """Columns of so many samples: padded as those of the batch are.

        Args:
            microbatch: samples.
        """
        return tuple((name, self._cut(meta, microbatch)) for name, meta in self.columns)

    def _cut(self, meta: TensorMeta, microbatch: int) -> TensorMeta:
        if not meta.shape or meta.shape[0] != self.count:
            return meta
        return replace(meta, shape=(microbatch, *meta.shape[1:]))


def samples_of(batch: Mapping[str, Any], columns: Signature, main_input: str = "") -> Samples:
    """The samples of a batch.

    Args:
        batch: columns of the batch.
        columns: their types and shapes, with those that are added to them.
        main_input: name of the column of which each sample has one row; else it is the first.
    """
    tensors = [own for own in batch.values() if isinstance(own, torch.Tensor) and own.dim()]
    known = batch.get(main_input, tensors[0] if tensors else None)
    is_column = isinstance(known, torch.Tensor) and known.dim()
    return Samples(columns, len(known) if is_column else 1)


def tokens_of(batch: Mapping[str, Any], main_input: str) -> tuple[int, int | None]:
    """Tokens of a sample and of a sequence; 1 and None where samples are no tokens.

    Args:
        batch: columns of a batch.
        main_input: name of the column whose elements may be tokens.
    """
    found = batch.get(main_input)
    if not isinstance(found, torch.Tensor) or found.is_floating_point() or found.dim() < 2:
        return 1, None
    return found[0].numel(), int(found.shape[-1])
