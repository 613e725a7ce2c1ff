"""Columns of example batches, and random values for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from merak.core.random import seed_for
from merak.core.tensor_meta import TensorMeta


@dataclass(frozen=True, slots=True)
class Run:
    """Number that stands several times in succession in every row, from the second place on.

    Args:
        number: such as the token of which an image has several.
        times: so often.
    """

    number: int
    times: int


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
        run: a number that every row has several times in succession; None where none is set.
        without: whole numbers that are not drawn, such as tokens with a meaning of their own.
        values: the numbers of every row, where these are fixed.
        per_sample: rows of a sample, where the rows are parts of samples, such as patches.
    """

    shape: tuple[int, ...]
    num_values: int | None = None
    first: int = 0
    last: int | None = None
    times: int = 1
    interleaved: bool = False
    is_switch: bool = False
    run: Run | None = None
    without: tuple[int, ...] = ()
    values: tuple[int, ...] | None = None
    per_sample: int = 1

    def of(self, samples: int) -> Column:
        """Make the column of a number of samples."""
        return replace(self, shape=(samples * self.per_sample, *self.shape[1:]))

    @property
    def meta(self) -> TensorMeta:
        """Metadata of the column."""
        if self.is_switch:
            return TensorMeta(self.shape, torch.bool)
        is_real = self.num_values is None and self.values is None
        dtype = torch.float32 if is_real else torch.int64
        meta = TensorMeta(self.shape, dtype)
        return replace(meta, ones=meta.may_be_ones and (self.num_values, self.first) == (1, 1))


Columns = dict[str, Column]


def draw_batch(columns: Mapping[str, Column], *, seed: int) -> dict[str, torch.Tensor]:
    """Draw random values for columns, the same for the same seed, on the CPU."""
    return {name: _draw(column, seed_for(seed, name)) for name, column in columns.items()}


def _draw(column: Column, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if column.values is not None:
        return torch.tensor(column.values).expand(column.shape).clone()
    if column.num_values is None:
        return torch.randn(column.shape, generator=generator)
    if column.interleaved:
        row = torch.arange(column.shape[-1]) % column.num_values + column.first
        return row.expand(column.shape).to(column.meta.dtype, copy=True)
    if column.last is None:
        numbers = range(column.first, column.first + column.num_values)
        chosen = torch.tensor([n for n in numbers if n not in column.without])
        drawn = chosen[torch.randint(len(chosen), column.shape, generator=generator)]
        if column.run is not None:
            drawn[..., 1 : 1 + column.run.times] = column.run.number
        return drawn.to(column.meta.dtype)
    drawn = torch.randint(column.num_values - 1, column.shape, generator=generator) + column.first
    drawn += drawn >= column.last
    length = column.shape[-1]
    ends = [(part + 1) * length // column.times - 1 for part in range(column.times)]
    drawn[..., ends] = column.last
    return drawn
