"""Map-style datasets: the batch sampler of one rank, and the dataset it asks for whole batches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sized
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler

from merak.core.random import seed_for
from merak.data.digest import INDICES, DigestedBatch, digest, digests_of
from merak.data.fetch import Fetch, collated, rng_for_batch, samples_at
from merak.data.own_dataset import StandsForDataset
from merak.data.random_stream import RandomStream

ROUNDS_AT_ONCE = 32
"""Rounds for which the inner sampler is asked ahead: switching random state has its price."""


@dataclass(frozen=True, slots=True)
class BatchKey:
    """The columns and samples that a rank asks its dataset for; sent to the loader's workers.

    Args:
        epoch: the pass over the dataset.
        index: the batch's place in the epoch, over all data parallel ranks.
        indices: what the single process's sampler gave for it; None where this rank has no batch.
    """

    epoch: int
    index: int
    indices: Any


class RankBatches(Sampler[BatchKey]):
    """Every `dp_degree`-th batch of a single process's batch sampler.

    Args:
        inner: the batch sampler (or, where the loader does not batch, the sampler) of a single
            process.
        dp_degree: data parallel degree.
        dp_rank: this rank's data parallel replica.
        seed: the job's seed; starts the draws of samplers that have no generator of their own.
        whole_rounds: leave out a last round that has no batch for some rank.
    """

    def __init__(
        self,
        inner: Any,
        *,
        dp_degree: int,
        dp_rank: int,
        seed: int,
        whole_rounds: bool = False,
    ) -> None:
        self.inner = inner
        self.dp_degree = dp_degree
        self.dp_rank = dp_rank
        self.seed = seed
        self.whole_rounds = whole_rounds
        self.epoch = 0
        # accelerate reads these two.
        self.batch_size = getattr(inner, "batch_size", None)
        self.drop_last = getattr(inner, "drop_last", False)

    @property
    def sampler(self) -> Any:
        """The sampler inside the inner batch sampler, which knows the epoch too."""
        return getattr(self.inner, "sampler", None)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration over the dataset."""
        self.epoch = epoch
        for inner in (self.inner, self.sampler):
            if hasattr(inner, "set_epoch"):
                inner.set_epoch(epoch)

    def __len__(self) -> int:
        rounds = len(self.inner) / self.dp_degree
        return math.floor(rounds) if self.whole_rounds else math.ceil(rounds)

    def __iter__(self) -> Iterator[BatchKey]:
        epoch = self.epoch
        draws = self._draws()
        batches = iter(self.inner)
        first = 0
        while True:
            with draws.active():
                taken = list(islice(batches, self.dp_degree * ROUNDS_AT_ONCE))
            if not taken:
                return
            # Whole rounds, so that a rank that is left out of the last one knows it.
            for start in range(0, len(taken), self.dp_degree):
                own = start + self.dp_rank
                if self.whole_rounds and start + self.dp_degree > len(taken):
                    return
                yield BatchKey(epoch, first + own, taken[own] if own < len(taken) else None)
            first += len(taken)

    def _draws(self) -> RandomStream:
        """The random generator of samplers that have none of their own.

        In the first epoch these are the draws that they get from `transformers.Trainer` in one
        process: the global generator after seeding, less the one number a loader's iterator takes.
        """
        stream = RandomStream(self.seed if self.epoch == 0 else seed_for(self.seed, self.epoch))
        with stream.active():
            torch.empty((), dtype=torch.int64).random_()
        return stream


class RankDataset(StandsForDataset, Dataset[Any]):
    """Gives whole batches, already collated, for the keys of `RankBatches`.

    Args:
        dataset: the user's dataset.
        fetch: how this rank reads and collates it; None where it reads nothing.
        batched: whether a key's indices are one index per sample; else they are handed to the
            dataset as they are, and what it returns to the collator.
    """

    own_names = frozenset({"dataset", "_fetch", "_batched"})

    def __init__(self, dataset: Any, fetch: Fetch | None, batched: bool) -> None:
        self.dataset = dataset
        self._fetch = fetch
        self._batched = batched

    def __len__(self) -> int:
        assert isinstance(self.dataset, Sized)
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __getitems__(self, key: BatchKey) -> dict[str, Any]:
        """The wanted columns of one batch, with digests of its samples; {} where there is none."""
        if key.indices is None:
            return {}
        indices = {INDICES: digest(key.indices)}
        columns = {} if self._fetch is None else self._collated(self._fetch, key)
        known = digests_of(columns)
        return DigestedBatch(columns, replace(known, digests={**known.digests, **indices}))

    def _collated(self, fetch: Fetch, key: BatchKey) -> dict[str, Any]:
        with rng_for_batch(fetch, key.epoch, key.index):
            if self._batched:
                return collated(fetch, samples_at(fetch, key.indices))
            return collated(fetch, fetch.dataset[key.indices])

    def set_epoch(self, epoch: int) -> None:
        """Tell the dataset, if it wants to know, which pass over it comes next."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
