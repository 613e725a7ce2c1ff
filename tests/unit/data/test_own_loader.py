from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from merak.data.loader import example_batch, shard_loader
from merak.data.own_loader import as_data_loader


def test_an_iterable_of_batches_becomes_a_loader_of_them() -> None:
    batches = [{"x": torch.arange(3)}, {"x": torch.arange(2)}]
    made = as_data_loader(batches)
    assert len(made) == 2
    assert [batch["x"].tolist() for batch in made] == [[0, 1, 2], [0, 1]]
    with pytest.raises(TypeError):
        len(as_data_loader(iter(batches)))


def test_a_loader_stays_as_it_is() -> None:
    loader: DataLoader[int] = DataLoader([1, 2])  # type: ignore[arg-type]
    assert as_data_loader(loader) is loader


class Doubling(DataLoader[Any]):
    """A loader that changes its batches on their way."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return ({"x": 2 * batch["x"]} for batch in super().__iter__())


class Around:
    """What stands for a loader, such as one that copies batches ahead."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.epochs: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        return ({"x": batch["x"] + 1} for batch in self.loader)

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def rows() -> DataLoader[Any]:
    return DataLoader([{"x": float(i)} for i in range(4)], batch_size=2)  # type: ignore[arg-type]


def values(loader: Any) -> list[list[float]]:
    return [batch["x"].tolist() for batch in loader]


def test_batches_are_those_that_the_loader_itself_yields() -> None:
    data: Any = rows().dataset
    assert values(as_data_loader(Doubling(data, batch_size=2))) == [[0, 2], [4, 6]]
    around = Around(rows())
    assert values(as_data_loader(around)) == [[1, 2], [3, 4]]
    sharded: Any = shard_loader(
        as_data_loader(around), dp_degree=2, dp_rank=1, columns=("x",), seed=0
    )
    sharded.set_epoch(3)
    assert values(sharded) == [[3, 4]]
    assert set(around.epochs) == {3}  # set for the dataset and for the stream


def test_a_generator_keeps_the_batch_that_the_model_is_traced_with() -> None:
    loader = as_data_loader(batch for batch in rows())
    assert [example_batch(loader, seed=0)["x"].tolist() for _ in range(2)] == [[0, 1], [0, 1]]
    sharded = shard_loader(loader, dp_degree=1, dp_rank=0, columns=("x",), seed=0)
    assert values(sharded) == [[0, 1], [2, 3]]
    assert values(sharded) == []
