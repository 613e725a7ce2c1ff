"""Columns of example batches, and random values for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from merak.core.random import seed_for
from merak.core.tensor_meta import TensorMeta


@dataclass(frozen=True, slots=True)
class Column:
    """Column of an example batch.

    Args:
        shape: its sizes, the batch first.
        num_values: so many different whole numbers; None for floating point numbers.
        first: the smallest of the whole numbers.
        last: the last one of every row, which is nowhere else in it, such as the token that ends
            a text; None where it is drawn like the others.
        times: number of times that it occurs: at the end of each of as many equal parts.
        interleaved: whether the whole numbers follow each other along a row instead of being drawn.
        is_switch: whether they stand for true and false.
    """

    shape: tuple[int, ...]
    num_values: int | None = None
    first: int = 0
    last: int | None = None
    times: int = 1
    interleaved: bool = False
    is_switch: bool = False

    @property
    def meta(self) -> TensorMeta:
        """Metadata of the column."""
        if self.is_switch:
            return TensorMeta(self.shape, torch.bool)
        dtype = torch.float32 if self.num_values is None else torch.int64
        meta = TensorMeta(self.shape, dtype)
        return replace(meta, ones=meta.may_be_ones and (self.num_values, self.first) == (1, 1))


Columns = dict[str, Column]


def draw_batch(columns: Mapping[str, Column], *, seed: int) -> dict[str, torch.Tensor]:
    """Draw random values for columns, the same for the same seed, on the CPU."""
    return {name: _draw(column, seed_for(seed, name)) for name, column in columns.items()}


def _draw(column: Column, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if column.num_values is None:
        return torch.randn(column.shape, generator=generator)
    if column.interleaved:
        row = torch.arange(column.shape[-1]) % column.num_values + column.first
        return row.expand(column.shape).to(column.meta.dtype, copy=True)
    if column.last is None:
        drawn = torch.randint(column.num_values, column.shape, generator=generator)
        return (drawn + column.first).to(column.meta.dtype)
    drawn = torch.randint(column.num_values - 1, column.shape, generator=generator) + column.first
    drawn += drawn >= column.last
    length = column.shape[-1]
    ends = [(part + 1) * length // column.times - 1 for part in range(column.times)]
    drawn[..., ends] = column.last
    return drawn
