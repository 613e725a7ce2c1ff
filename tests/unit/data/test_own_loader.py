from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

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
