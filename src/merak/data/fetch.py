"""Fetching of batches: samples to columns, with the same random draws on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch.utils.data import IterableDataset
from transformers.trainer_utils import RemoveColumnsCollator

from merak.core.errors import DataError
from merak.core.random import seed_for
from merak.data.columns import columns_read, is_stored, narrow_dataset
from merak.data.digest import DigestedBatch, digest_columns
from merak.data.non_tensors import drop_non_tensors
from merak.data.objects import pack_objects
from merak.data.random_stream import RandomStream

_SAME_COLUMNS = "the model is traced for the columns of the first batch, and all need the same"


@dataclass(frozen=True, slots=True)
class KnownColumns:
    """Columns of the first batch, which the model is traced for.

    Args:
        columns: their names.
        absent: columns that the model takes, and that are not among these.
    """

    columns: frozenset[str]
    absent: frozenset[str] = frozenset()

    def refusal(self, column: str) -> DataError:
        """Error about a column that is not among them."""
        return DataError(
            f"a batch has column {column!r}, which the first batch, with "
            f"{', '.join(sorted(self.columns))}, does not have; {_SAME_COLUMNS}: give every sample "
            "the same columns, with labels of -100 where there are none."
        )


@dataclass(frozen=True, slots=True)
class Fetch:
    """Recipe of a rank for its batches.

    Args:
        dataset: of the samples, narrowed to the columns that are read where it can be.
        collate: makes a batch of samples.
        columns: the columns wanted of the batch; None for all.
        reads: the columns of a sample that `collate` is given; None for whole samples.
        seed: of every random draw in the dataset and the collator.
        may_draw: whether the dataset or the collator may draw random numbers.
        non_tensors: arguments that every batch has beside its columns.
        known: the columns of the first batch, which all have; None where they may differ.
    """

    dataset: Any
    collate: Callable[[Any], Any]
    columns: tuple[str, ...] | None
    reads: frozenset[str] | None
    seed: int
    may_draw: bool
    non_tensors: Mapping[str, Any] = field(default_factory=dict)
    known: KnownColumns | None = None


def make_fetch(
    dataset: Any,
    collate: Callable[[Any], Any],
    columns: tuple[str, ...] | None,
    seed: int,
    non_tensors: Mapping[str, Any] = MappingProxyType({}),
    known: KnownColumns | None = None,
) -> Fetch:
    """Recipe for the batches of a rank, which reads only the columns it needs.

    Args:
        dataset: the user's dataset.
        collate: the user's collator, or transformers' wrapper of it.
        columns: the columns wanted of the batch; None for all.
        seed: the job's seed.
        non_tensors: arguments that every batch has beside its columns.
        known: the columns of the first batch, which all have; None where they may differ.
    """
    collate, own_seed = _without_own_generator(collate)
    seed = seed if own_seed is None else seed_for(seed, "collator", own_seed)
    may_draw = not (is_stored(dataset) and columns_read(collate, ()) is not None)
    if columns is None:
        return Fetch(dataset, collate, None, None, seed, may_draw)
    reads = columns_read(collate, columns)
    if reads is not None:
        dataset = narrow_dataset(dataset, reads)
    return Fetch(dataset, collate, columns, reads, seed, may_draw, non_tensors, known)


def _without_own_generator(
    collate: Callable[[Any], Any],
) -> tuple[Callable[[Any], Any], int | None]:
    """The collator without its own generator, and the seed of that generator.

    A generator inside the collator moves on with every batch a rank makes, so that its draws would
    depend on how many dp ranks share the batches.
    """
    if isinstance(collate, RemoveColumnsCollator):
        inner, own_seed = _without_own_generator(collate.data_collator)
        if own_seed is not None:
            collate = copy.copy(collate)
            collate.data_collator = inner
        return collate, own_seed
    own_seed = getattr(collate, "seed", None)
    if not isinstance(own_seed, int) or not hasattr(collate, "generator"):
        return collate, None
    bare: Any = copy.copy(collate)
    bare.seed, bare.generator = None, None
    return bare, own_seed


@contextmanager
def rng_for_batch(fetch: Fetch, *key: int) -> Iterator[None]:
    """Random state of one batch: the same wherever and whenever the batch is made."""
    if not fetch.may_draw:
        yield
        return
    with RandomStream(seed_for(fetch.seed, "data", *key)).active():
        yield


def collated(fetch: Fetch, samples: Any) -> dict[str, Any]:
    """Collate samples into the wanted columns of a batch, with digests of all of its columns.

    Raises:
        DataError: the collator gives no columns, or not all that are wanted, or other arguments.
    """
    batch = fetch.collate(samples)
    if not isinstance(batch, Mapping):
        raise DataError(
            f"the data_collator gave a {type(batch).__name__}, not a dict of columns; let the "
            "dataset's samples be dicts, or give a data_collator that returns a dict."
        )
    batch = pack_objects(batch)
    if fetch.columns is None:
        return batch
    batch = drop_non_tensors(batch, fetch.non_tensors)
    for column in fetch.columns:
        if column not in batch:
            raise DataError(
                f"the model reads column {column!r}, but the batch has "
                f"{', '.join(batch) or 'no columns'}; add the column to the dataset, or give a "
                f"data_collator that makes it: {_SAME_COLUMNS}."
            )
    for column in batch:
        if fetch.known is not None and column not in fetch.known.columns:
            raise fetch.known.refusal(column)
    wanted = {column: batch[column] for column in fetch.columns}
    return DigestedBatch(wanted, digest_columns(batch, fetch.columns))


def narrowed(fetch: Fetch, sample: Any) -> Any:
    """A sample with only the columns that the collator reads.

    Raises:
        DataError: it has one that the model takes, and the first batch did not have.
    """
    if fetch.reads is None or not isinstance(sample, Mapping):
        return sample
    if fetch.known is not None:
        for column in fetch.known.absent:
            if sample.get(column) is not None:  # which collators leave out
                raise fetch.known.refusal(column)
    return {column: sample[column] for column in sample if column in fetch.reads}


def samples_at(fetch: Fetch, indices: Any) -> list[Any]:
    """Samples of a map-style dataset, narrowed.

    Args:
        fetch: says which dataset and which columns.
        indices: one index per sample.
    """
    get_many = getattr(fetch.dataset, "__getitems__", None)
    samples = get_many(indices) if get_many else [fetch.dataset[index] for index in indices]
    return [narrowed(fetch, sample) for sample in samples]


def is_iterable(dataset: object) -> bool:
    """Whether a dataset has an order of its own instead of indices."""
    return isinstance(dataset, IterableDataset)


def as_is(batch: Any) -> Any:
    """Leave a batch that the dataset already collated as it is."""
    return batch
