"""Loaders of a script's own that are no `DataLoader`: any iterable of batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

_LIBRARIES = ("torch", "accelerate", "torchdata")
"""Packages whose loaders yield what their sampler, dataset and collator make, and nothing else."""


class Batches(IterableDataset[Any]):
    """The batches of an iterable, as a dataset whose samples they are.

    Args:
        source: yields batches, and may have a length. An iterator that can be read once only, such
            as a generator, still has its first batch for whoever looks at no more than that.
    """

    def __init__(self, source: Iterable[Any]) -> None:
        self.source = source
        self._first: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        found = iter(self.source)
        return self._once(found) if found is self.source else found

    def _once(self, source: Iterator[Any]) -> Iterator[Any]:
        if not self._first:
            self._first.extend(islice(source, 1))
        yield from self._first
        self._first.clear()
        yield from source

    def set_epoch(self, epoch: int) -> None:
        """Tell the iterable which pass over it the next one is, if it wants to know."""
        own = getattr(self.source, "set_epoch", None)
        if callable(own):
            own(epoch)

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]  # a TypeError where it has none


def as_data_loader(loader: Any) -> DataLoader[Any]:
    """Return a loader as a `DataLoader` whose batches are those that iterating it yields.

    Args:
        loader: one, or any other iterable of batches: also a `DataLoader` with an `__iter__` of its
            own, or an object around one.
    """
    if isinstance(loader, DataLoader):
        owner = next(cls for cls in type(loader).__mro__ if "__iter__" in vars(cls))
        if owner.__module__.partition(".")[0] in _LIBRARIES:
            return loader
    return DataLoader(Batches(loader), batch_size=None, collate_fn=_same)


def _same(batch: Any) -> Any:
    return batch
