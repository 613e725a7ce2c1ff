"""Loaders of a script's own that are no `DataLoader`: any iterable of batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset


class Batches(IterableDataset[Any]):
    """The batches of an iterable, as a dataset whose samples they are.

    Args:
        source: yields batches, and may have a length.
    """

    def __init__(self, source: Iterable[Any]) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        return iter(self.source)

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]  # a TypeError where it has none


def as_data_loader(loader: Any) -> DataLoader[Any]:
    """Return a loader as a `DataLoader`.

    Args:
        loader: one, or any other iterable of batches.
    """
    if hasattr(loader, "dataset"):
        made: DataLoader[Any] = loader
        return made
    return DataLoader(Batches(loader), batch_size=None, collate_fn=_same)


def _same(batch: Any) -> Any:
    return batch
