"""The longest samples of a dataset, for a batch that takes as much memory as any is likely to."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from merak.data.fetch import collated, is_iterable, make_fetch, rng_for_batch, samples_at
from merak.data.loader import example_batch

MOST_LOOKED_AT = 64
"""Samples that are fetched for their lengths, where no table has the lengths of all."""


@dataclass(frozen=True, slots=True)
class LongestBatch:
    """A batch with the longest sample that was found.

    Args:
        columns: of the batch.
        length: of the longest sample; None where samples are of one length, or of none.
        num_looked_at: samples whose lengths were read.
    """

    columns: dict[str, Any]
    length: int | None = None
    num_looked_at: int = 0


def longest_batch(loader: DataLoader[Any], column: str, *, seed: int) -> LongestBatch:
    """A batch of a loader's first samples, one of which is the longest that can be found cheaply.

    Lengths of all samples are read where the dataset is a table that stores them; else those of
    `MOST_LOOKED_AT` samples, drawn at random by the seed. All ranks get the same batch.

    Args:
        loader: as of `example_batch`, whose batch is returned where lengths do not differ.
        column: whose length counts.
        seed: the job's seed.

    Raises:
        DataError: the dataset is empty, or its batches are not dicts.
    """
    first, dataset = example_batch(loader, seed=seed), loader.dataset
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if is_iterable(dataset) or size is None:
        return LongestBatch(first)
    fetch = make_fetch(dataset, loader.collate_fn, None, seed)
    with rng_for_batch(fetch, -1):
        lengths = _stored_lengths(dataset, column)
        if lengths is None:
            everything = range(len(dataset))  # type: ignore[arg-type]
            drawn = random.Random(seed).sample(everything, min(MOST_LOOKED_AT, len(everything)))
            samples = samples_at(fetch, drawn)
            found = [_length(sample, column) for sample in samples]
            if None in found:
                return LongestBatch(first)
            lengths = dict(zip(drawn, (own or 0 for own in found), strict=True))
        if len(set(lengths.values())) == 1:
            return LongestBatch(first)
        longest = max(lengths, key=lambda index: (lengths[index], -index))
        others = [index for index in range(min(size, len(dataset))) if index != longest]  # type: ignore[arg-type]
        indices = [longest, *others][:size]
        columns = collated(fetch, samples_at(fetch, indices))
    return LongestBatch(columns, lengths[longest], len(lengths))


def _stored_lengths(dataset: Any, column: str) -> dict[int, int] | None:
    """Lengths of all samples, from the table of a dataset that neither selects nor transforms."""
    table: Any = getattr(dataset, "data", None)
    is_plain = getattr(dataset, "_indices", 0) is None
    changes = getattr(dataset, "format", {}).get("type") == "custom" if is_plain else True
    if not is_plain or changes or column not in getattr(table, "column_names", ()):
        return None
    chunks = table.column(column).chunks
    if not all(hasattr(chunk, "value_lengths") for chunk in chunks):
        return None  # no lists
    lengths = [length for chunk in chunks for length in chunk.value_lengths().to_pylist()]
    return {index: length or 0 for index, length in enumerate(lengths)}


def _length(sample: Any, column: str) -> int | None:
    value: Any = sample.get(column) if isinstance(sample, Mapping) else None
    if isinstance(value, torch.Tensor):
        return len(value) if value.dim() == 1 else None
    is_row = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return len(value) if is_row else None
