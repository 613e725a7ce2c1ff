"""Iterable datasets: batches in the dataset's own order, every `dp_degree`-th to this rank."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from merak.data.fetch import Fetch, as_is, collated, narrowed, rng_for_batch
from merak.data.own_dataset import StandsForDataset


class CollatedStream(IterableDataset[Any]):
    """All batches of an iterable dataset, collated where it is iterated, in a worker or here.

    Args:
        fetch: how this rank reads and collates the dataset.
        batch_size: samples per batch; None where the dataset itself yields batches.
        drop_last: whether a smaller last batch is left out.
        wanted: the batches that are worth collating; the others become {}.
    """

    def __init__(
        self, fetch: Fetch, batch_size: int | None, drop_last: bool, wanted: slice
    ) -> None:
        self._fetch = fetch
        self._wanted = range(sys.maxsize)[wanted]
        self._batch_size = batch_size
        self._drop_last = drop_last
        # Shared memory: workers that live on for several epochs see it change.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration over the dataset."""
        self._epoch.fill_(epoch)
        if hasattr(self._fetch.dataset, "set_epoch"):
            self._fetch.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        length = len(self._fetch.dataset)
        if self._batch_size is None:
            return length
        return (
            length // self._batch_size if self._drop_last else math.ceil(length / self._batch_size)
        )

    def __iter__(self) -> Iterator[dict[str, Any]]:
        fetch, epoch = self._fetch, int(self._epoch)
        worker = get_worker_info()
        worker_id = worker.id if worker else 0
        with rng_for_batch(fetch, epoch, worker_id, -1):
            samples = iter(fetch.dataset)
        index = 0
        while True:
            with rng_for_batch(fetch, epoch, worker_id, index):
                batch = self._next_batch(samples, index in self._wanted)
            if batch is None:
                return
            yield batch
            index += 1

    def _next_batch(self, samples: Iterator[Any], wanted: bool) -> dict[str, Any] | None:
        fetch, size = self._fetch, self._batch_size
        taken = [narrowed(fetch, sample) for sample in islice(samples, size or 1)]
        if not taken or (size is not None and self._drop_last and len(taken) < size):
            return None
        if not wanted or fetch.columns == ():
            return {}
        return collated(fetch, taken if size is not None else taken[0])


class RankStream(StandsForDataset, IterableDataset[Any]):
    """The batches of one data parallel rank out of an iterable dataset, and {} where it has none.

    Every rank iterates the dataset, also one that wants no columns: only so does it know where the
    epoch ends. Foreign batches are collated too when workers read ahead, since a worker cannot know
    the place of its batch among those of the other workers.

    Args:
        fetch: how this rank reads and collates the dataset.
        dp_degree: data parallel degree.
        dp_rank: this rank's data parallel replica.
        batch_size: samples per batch; None where the dataset itself yields batches.
        drop_last: whether a smaller last batch is left out.
        options: the loader's worker options.
        whole_rounds: leave out a last round that has no batch for some rank.
    """

    own_names = frozenset(
        {"dataset", "_batches", "_loader", "_dp_degree", "_dp_rank", "_whole_rounds"}
    )

    def __init__(
        self,
        fetch: Fetch,
        *,
        dp_degree: int,
        dp_rank: int,
        batch_size: int | None,
        drop_last: bool,
        options: dict[str, Any],
        whole_rounds: bool = False,
    ) -> None:
        self.dataset = fetch.dataset
        alone = not options.get("num_workers")
        wanted = slice(dp_rank, None, dp_degree) if alone else slice(None)
        self._batches = CollatedStream(fetch, batch_size, drop_last, wanted)
        self._loader: DataLoader[Any] = DataLoader(
            self._batches, batch_size=None, collate_fn=as_is, **options
        )
        self._dp_degree = dp_degree
        self._dp_rank = dp_rank
        self._whole_rounds = whole_rounds

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration over the dataset."""
        self._batches.set_epoch(epoch)

    def __len__(self) -> int:
        rounds = len(self._batches) / self._dp_degree
        return math.floor(rounds) if self._whole_rounds else math.ceil(rounds)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        batches = iter(self._loader)
        while turn := list(islice(batches, self._dp_degree)):
            if self._whole_rounds and len(turn) < self._dp_degree:
                return
            yield turn[self._dp_rank] if self._dp_rank < len(turn) else {}
