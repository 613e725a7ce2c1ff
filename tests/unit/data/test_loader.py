"""The order, sharing and length of a rank's loader, for map-style datasets."""

import datasets
import pytest
import torch
from accelerate import skip_first_batches
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from merak.core.errors import DataError
from merak.data import example_batch, shard_loader
from tests.unit.data.helpers import (
    Recorder,
    Stream,
    interleave,
    noisy_collate,
    plain_loader,
    prepared_loader,
    same,
    share,
)

STRATEGIES = ["random", "sequential", "group_by_length", "batch_rebalance"]


def varied(length: int) -> datasets.Dataset:
    """Samples of different lengths, padded by `pad` below."""
    rows = [[index + 1] * (1 + index * 7 % 5) for index in range(length)]
    return datasets.Dataset.from_dict({"input_ids": rows, "labels": rows})


def pad(samples):
    rows = [torch.tensor(sample["input_ids"]) for sample in samples]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"input_ids": ids, "labels": ids.clone()}


@pytest.mark.parametrize("dp_degree", [1, 2, 3, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("drop_last", [False, True])
def test_order_is_that_of_a_single_process(tmp_path, strategy, dp_degree, drop_last):
    arguments = {"train_sampling_strategy": strategy, "dataloader_drop_last": drop_last}

    def make():
        return prepared_loader(tmp_path, varied(19), pad, **arguments)

    expected = list(make())
    shares = [list(share(make(), dp_degree, rank)) for rank in range(dp_degree)]
    got = interleave(shares)
    assert len(got) == len(expected) > 0
    assert all(same(a, b) for a, b in zip(got, expected, strict=True))


def test_shuffle_advances_by_epoch_as_in_a_single_process(tmp_path):
    single = prepared_loader(tmp_path, varied(11), pad)
    ranks = [share(prepared_loader(tmp_path, varied(11), pad), 2, rank) for rank in range(2)]
    epochs = []
    for epoch in range(3):
        for loader in (single, *ranks):
            loader.set_epoch(epoch)
        epochs.append(list(single))
        got = interleave([list(rank) for rank in ranks])
        assert all(same(a, b) for a, b in zip(got, epochs[-1], strict=True))
    assert not all(same(a, b) for a, b in zip(epochs[0], epochs[1], strict=True))


@pytest.mark.parametrize("strategy", ["group_by_length", "batch_rebalance"])
def test_other_samplers_advance_by_epoch_and_agree_between_ranks(tmp_path, strategy):
    def epochs(dp_degree, rank):
        loader = prepared_loader(tmp_path, varied(19), pad, train_sampling_strategy=strategy)
        loader = share(loader, dp_degree, rank)
        taken = []
        for epoch in range(3):
            torch.manual_seed(rank)  # as a rank that has drawn other numbers than its neighbours
            loader.set_epoch(epoch)
            taken.append(list(loader))
        return taken

    alone = epochs(1, 0)
    shares = [epochs(2, rank) for rank in range(2)]
    for epoch in range(3):
        got = interleave([taken[epoch] for taken in shares])
        assert all(same(a, b) for a, b in zip(got, alone[epoch], strict=True))
    assert not all(same(a, b) for a, b in zip(alone[1], alone[2], strict=True))


@pytest.mark.parametrize(("length", "dp_degree"), [(1, 4), (7, 2), (8, 2), (9, 4), (10, 3)])
def test_no_sample_is_lost_or_repeated_and_lengths_agree(length, dp_degree):
    loaders = [share(plain_loader(Recorder(length)), dp_degree, r) for r in range(dp_degree)]
    shares = [list(loader) for loader in loaders]
    num_batches = -(-length // 2)
    assert {len(loader) for loader in loaders} == {-(-num_batches // dp_degree)}
    assert [len(taken) for taken in shares] == [len(loader) for loader in loaders]
    seen = [int(i) for batch in interleave(shares) for i in batch["input_ids"][:, 0]]
    assert seen == list(range(length))
    assert sum(not batch for taken in shares for batch in taken) == -num_batches % dp_degree


def test_an_epoch_of_many_rounds_is_shared_out_in_order(tmp_path):
    def make():
        return prepared_loader(
            tmp_path,
            varied(250),
            pad,
            per_device_train_batch_size=1,
            train_sampling_strategy="group_by_length",
        )

    shares = [list(share(make(), 3, rank)) for rank in range(3)]
    assert [len(taken) for taken in shares] == [84, 84, 84]
    for got, expected in zip(interleave(shares), make(), strict=True):
        assert same(got, expected)


def test_the_ragged_last_batch_keeps_its_size():
    shares = [list(share(plain_loader(Recorder(5)), 2, rank)) for rank in range(2)]
    assert [batch["input_ids"].shape[0] for batch in interleave(shares)] == [2, 2, 1]
    assert shares[1][-1] == {}


@pytest.mark.parametrize("epoch", [0, 2])
@pytest.mark.parametrize("num_skipped", [0, 1, 3])
def test_skipping_batches_leaves_the_rest_as_they_were(tmp_path, num_skipped, epoch):
    whole = share(prepared_loader(tmp_path, Recorder(13), noisy_collate), 2, 1)
    skipped = skip_first_batches(
        share(prepared_loader(tmp_path, Recorder(13), noisy_collate), 2, 1), num_skipped
    )
    whole.set_epoch(epoch)
    # As transformers' trainer does after a resume.
    skipped.set_epoch(epoch)
    skipped.batch_sampler.batch_sampler.set_epoch(epoch)
    expected = list(whole)[num_skipped:]
    assert all(same(a, b) for a, b in zip(skipped, expected, strict=True))


def test_a_rank_without_columns_never_touches_the_dataset():
    dataset = Recorder(9)
    loader = share(plain_loader(dataset, num_workers=2), 2, 0, ())
    assert loader.num_workers == 0
    assert list(loader) == [{}, {}, {}]
    assert dataset.asked == []


def test_a_rank_reads_only_its_own_batches():
    dataset = Recorder(9)
    list(share(plain_loader(dataset), 2, 1))
    assert dataset.asked == [2, 3, 6, 7]


def test_sizes_that_accelerate_and_the_evaluation_loop_read():
    loader = share(plain_loader(Recorder(9)), 2, 0)
    assert (loader.total_batch_size, loader.total_dataset_length) == (2, 9)
    assert len(loader.dataset) == 9
    assert loader.dataset[3]["input_ids"].tolist() == [3, 3, 3]


def test_workers_give_what_one_process_gives(tmp_path):
    single = share(prepared_loader(tmp_path, Recorder(9), noisy_collate), 2, 1)
    workers = share(
        prepared_loader(tmp_path, Recorder(9), noisy_collate, dataloader_num_workers=2), 2, 1
    )
    assert workers.num_workers == 2
    for epoch in range(2):
        single.set_epoch(epoch)
        workers.set_epoch(epoch)
        assert all(same(a, b) for a, b in zip(single, workers, strict=True))


def test_a_loader_that_does_not_batch():
    shares = [list(share(plain_loader(Recorder(5), batch_size=None), 2, r)) for r in range(2)]
    assert [int(batch["input_ids"][0]) for batch in interleave(shares)] == [0, 1, 2, 3, 4]
    assert [len(taken) for taken in shares] == [3, 3]


def test_a_loader_with_a_batch_sampler_as_its_sampler():
    dataset = datasets.Dataset.from_dict({"labels": list(range(5))}).with_format("torch")
    sampler = BatchSampler(SequentialSampler(dataset), 2, drop_last=False)

    def make():
        return DataLoader(dataset, sampler=sampler, batch_size=None)

    shares = [list(share(make(), 2, rank)) for rank in range(2)]
    assert [batch["labels"].tolist() for batch in interleave(shares)] == [[0, 1], [2, 3], [4]]


def test_the_dataset_is_told_the_epoch():
    dataset = Recorder(4)
    epochs = []
    dataset.set_epoch = epochs.append
    loader = share(plain_loader(dataset), 1, 0)
    loader.set_epoch(3)
    list(loader)
    assert set(epochs) == {3}


def test_no_full_batch_is_refused():
    with pytest.raises(DataError, match=r"3 samples do not fill one batch of 8 and drop_last"):
        share(plain_loader(Recorder(3), batch_size=8, drop_last=True))


def test_an_empty_dataset_is_refused():
    empty = datasets.Dataset.from_dict({"input_ids": []})
    with pytest.raises(DataError, match="the training dataset is empty"):
        share(plain_loader(empty))
    with pytest.raises(DataError, match="the training dataset is empty"):
        example_batch(plain_loader(empty), seed=5)


def test_the_example_batch_disturbs_nothing(tmp_path):
    loader = prepared_loader(tmp_path, Recorder(9), noisy_collate)
    state = torch.get_rng_state()
    first = example_batch(loader, seed=5)
    assert first["input_ids"].tolist() == [[0, 0, 0], [1, 1, 1]]
    assert same(first, example_batch(loader, seed=5))
    assert torch.equal(state, torch.get_rng_state())
    expected = list(prepared_loader(tmp_path, Recorder(9), noisy_collate))
    got = list(loader)
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(got, expected))


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("dataset", [varied(11), Stream(11)], ids=["mapped", "streamed"])
def test_whole_rounds_leave_out_what_not_every_rank_has(dataset, num_workers):
    for rank in range(4):
        collate = pad if isinstance(dataset, datasets.Dataset) else None
        loader = plain_loader(dataset, collate_fn=collate, num_workers=num_workers)
        options = {"columns": None, "seed": 5, "whole_rounds": True}
        (own,) = shard_loader(loader, dp_degree=4, dp_rank=rank, **options)  # of 6 batches
        assert own


def test_too_few_batches_for_a_whole_round():
    with pytest.raises(DataError, match=r"2 batches are not one for each of dp=3 replicas"):
        shard_loader(
            plain_loader(Recorder(4)), dp_degree=3, dp_rank=0, columns=None, seed=5,
            whole_rounds=True,
        )  # fmt: skip
