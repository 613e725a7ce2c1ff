"""Random datasets and collators: the same draws in every layout, the global state untouched."""

import random

import numpy as np
import pytest
import torch
from transformers import DataCollatorForLanguageModeling

from merak.data.random_stream import RandomStream
from tests.unit.data.helpers import (
    Recorder,
    interleave,
    noisy_collate,
    plain_loader,
    prepared_loader,
    same,
    share,
)
from tests.unit.data.test_columns import tokenizer


def drawn():
    return torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()


def test_a_stream_goes_on_where_it_was_and_leaves_the_global_state():
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(1)
    outside = drawn()
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(1)
    stream, whole = RandomStream(7), RandomStream(7)
    with stream.active():
        first = drawn()
    assert drawn() == outside
    with stream.active():
        second = drawn()
    with whole.active():
        assert (drawn(), drawn()) == (first, second)
    assert first != second


def test_the_global_state_comes_back_after_an_error():
    before = torch.get_rng_state()
    with pytest.raises(KeyError), RandomStream(7).active():
        torch.rand(1)
        raise KeyError
    assert torch.equal(before, torch.get_rng_state())


class Noisy(Recorder):
    def __getitem__(self, index):
        return super().__getitem__(index) | {"drawn": torch.rand(2)}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_rank_of_every_layout_draws_the_same(num_workers):
    def batches(dp_degree, rank, columns):
        loader = plain_loader(Noisy(9), collate_fn=noisy_collate, num_workers=num_workers)
        torch.manual_seed(100 * dp_degree + rank)
        return list(share(loader, dp_degree, rank, columns))

    alone = batches(1, 0, None)
    for columns in (("input_ids",), ("labels", "noise")):
        got = interleave([batches(2, rank, columns) for rank in range(2)])
        for whole, part in zip(alone, got, strict=True):
            assert same({column: whole[column] for column in columns}, part)


def test_draws_differ_by_batch_and_epoch_and_leave_the_global_state(tmp_path):
    loader = share(prepared_loader(tmp_path, Recorder(8), noisy_collate))
    iterator = iter(loader)
    first = [next(iterator)]  # here torch takes a seed for its workers from the global state
    before = drawn_state()
    first += list(iterator)
    assert drawn_state() == before
    second = list(loader)
    noise = [batch["noise"][0, 0].item() for batch in (*first, *second)]
    assert len(set(noise)) == len(noise)


def drawn_state():
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()


@pytest.mark.parametrize("own_seed", [None, 3])
@pytest.mark.parametrize("wrapped", [False, True])
def test_masked_language_modelling_agrees_between_ranks_and_layouts(tmp_path, own_seed, wrapped):
    rows = [{"input_ids": [2, 3, 4] * 5} for _ in range(8)]

    def batches(dp_degree, rank, columns):
        collate = DataCollatorForLanguageModeling(tokenizer(), mlm=True, seed=own_seed)
        loader = (
            prepared_loader(tmp_path, rows, collate)
            if wrapped
            else plain_loader(rows, collate_fn=collate)
        )
        return list(share(loader, dp_degree, rank, columns))

    alone = batches(1, 0, ("input_ids", "labels"))
    ids = interleave([batches(2, rank, ("input_ids",)) for rank in range(2)])
    labels = interleave([batches(2, rank, ("labels",)) for rank in range(2)])
    for whole, first, last in zip(alone, ids, labels, strict=True):
        assert same(whole, first | last)
    masks = {str((batch["labels"] != -100).tolist()) for batch in alone}
    assert len(masks) > 1


def test_a_collators_own_seed_counts():
    rows = [{"input_ids": [2, 3, 4] * 9} for _ in range(4)]

    def labels(own_seed):
        collate = DataCollatorForLanguageModeling(tokenizer(), mlm=True, seed=own_seed)
        return [batch["labels"].tolist() for batch in share(plain_loader(rows, collate_fn=collate))]

    assert labels(3) == labels(3)
    assert labels(3) != labels(4)
