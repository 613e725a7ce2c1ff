"""The batch with the longest sample that can be found cheaply."""

from __future__ import annotations

import datasets
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from merak.data import longest_batch
from merak.data.longest import MOST_LOOKED_AT


def padded(samples):
    rows = [torch.as_tensor(own["input_ids"]) for own in samples]
    return {"input_ids": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)}


class Rows(Dataset):
    def __init__(self, lengths):
        self.lengths, self.fetched = lengths, 0

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        self.fetched += 1
        return {"input_ids": [1] * self.lengths[index]}


def found(dataset):
    loader = DataLoader(dataset, batch_size=8, collate_fn=padded)
    return longest_batch(loader, "input_ids", seed=1)


def test_a_table_has_the_lengths_of_all_samples():
    lengths = [3] * 1000
    lengths[777] = 50
    table = datasets.Dataset.from_dict({"input_ids": [[1] * own for own in lengths]})
    batch = found(table)
    assert (batch.length, batch.num_looked_at) == (50, 1000)
    assert batch.columns["input_ids"].shape == (8, 50)


@pytest.mark.parametrize("change", ["select", "transform"])
def test_a_table_is_not_read_past_its_selection_or_transform(change):
    table = datasets.Dataset.from_dict({"input_ids": [[1] * own for own in [90, 3, 4, 5, 6]]})
    if change == "select":
        assert found(table.select([1, 3, 2])).length == 5
    else:
        table.set_transform(lambda rows: {"input_ids": [own[:4] for own in rows["input_ids"]]})
        assert found(table).length == 4


def test_other_datasets_are_sampled_by_a_bounded_number():
    rows = Rows([2, 9] * 5000)
    batch = found(rows)
    assert (batch.length, batch.num_looked_at) == (9, MOST_LOOKED_AT)
    assert rows.fetched <= MOST_LOOKED_AT + 16
    assert batch.columns["input_ids"].shape == (8, 9)
    assert torch.equal(batch.columns["input_ids"], found(rows).columns["input_ids"])


def test_samples_of_one_length_are_the_first_ones():
    batch = found(Rows([7] * 20))
    assert batch.length is None and batch.columns["input_ids"].shape == (8, 7)
