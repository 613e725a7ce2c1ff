"""The loader of one rank over iterable datasets."""

import datasets
import pytest
import torch
from accelerate import skip_first_batches

from merak.core.errors import DataError
from merak.data import example_batch
from tests.unit.data.helpers import (
    Stream,
    interleave,
    noisy_collate,
    plain_loader,
    prepared_loader,
    same,
    share,
)


def numbers(batches):
    return [batch["input_ids"].flatten().tolist() for batch in batches]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("dp_degree", [1, 2, 3])
def test_order_is_that_of_a_single_process(num_workers, drop_last, dp_degree):
    def make():
        return plain_loader(Stream(11), num_workers=num_workers, drop_last=drop_last)

    shares = [list(share(make(), dp_degree, rank)) for rank in range(dp_degree)]
    assert len({len(taken) for taken in shares}) == 1
    assert numbers(interleave(shares)) == numbers(make())


def test_batches_of_the_trainers_loader_and_epochs(tmp_path):
    single = prepared_loader(tmp_path, Stream(5), max_steps=5)
    ranks = [share(prepared_loader(tmp_path, Stream(5), max_steps=5), 2, r) for r in range(2)]
    for epoch in range(2):
        for loader in (single, *ranks):
            loader.set_epoch(epoch)
        expected = numbers(single)
        assert expected[0] == [1000 * epoch, 1000 * epoch + 1]
        assert numbers(interleave([list(rank) for rank in ranks])) == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_workers_that_live_on_draw_anew_each_epoch(num_workers):
    options = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    loader = share(plain_loader(Stream(5), collate_fn=noisy_collate, **options))
    epochs = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        epochs.append([batch["noise"] for batch in loader])
    assert not any(torch.equal(a, b) for a, b in zip(*epochs, strict=True))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_rank_of_every_layout_draws_the_same(num_workers):
    def batches(dp_degree, rank, columns):
        loader = plain_loader(Stream(9), collate_fn=noisy_collate, num_workers=num_workers)
        torch.manual_seed(100 * dp_degree + rank)
        return list(share(loader, dp_degree, rank, columns))

    alone = batches(1, 0, None)
    got = interleave([batches(2, rank, ("labels", "noise")) for rank in range(2)])
    for whole, part in zip(alone, got, strict=True):
        assert same({column: whole[column] for column in ("labels", "noise")}, part)


def test_a_sized_stream_has_a_length_and_others_have_none():
    assert len(share(plain_loader(Stream(9, sized=True)), 2, 0)) == 3
    assert len(share(plain_loader(Stream(9, sized=True), drop_last=True), 3, 0)) == 2
    with pytest.raises(TypeError):
        len(share(plain_loader(Stream(9)), 2, 0))


def test_a_rank_without_columns_ends_its_epoch_with_the_others():
    assert list(share(plain_loader(Stream(9)), 2, 1, ())) == [{}, {}, {}]


def test_skipping_batches_leaves_the_rest_as_they_were():
    expected = list(share(plain_loader(Stream(9), collate_fn=noisy_collate), 2, 1))[1:]
    loader = share(plain_loader(Stream(9), collate_fn=noisy_collate), 2, 1)
    skipped = skip_first_batches(loader, 1)
    assert all(same(a, b) for a, b in zip(skipped, expected, strict=True))


def test_foreign_batches_are_not_collated_without_workers():
    collated = []

    def collate(samples):
        collated.append(len(samples))
        return {"input_ids": torch.stack([sample["input_ids"] for sample in samples])}

    list(share(plain_loader(Stream(9), collate_fn=collate), 2, 1))
    assert collated == [2, 2]


def test_a_dataset_that_batches_itself():
    shares = [list(share(plain_loader(Stream(5), batch_size=None), 2, rank)) for rank in range(2)]
    assert numbers(interleave(shares)) == [[0], [1], [2], [3], [4]]


def test_a_streamed_hugging_face_dataset_reads_only_wanted_columns():
    rows = datasets.Dataset.from_dict({"input_ids": [1, 2, 3], "labels": [4, 5, 6]})
    stream = rows.to_iterable_dataset().with_format("torch")
    shares = [list(share(plain_loader(stream), 2, rank, ("labels",))) for rank in range(2)]
    assert [batch["labels"].tolist() for batch in interleave(shares)] == [[4, 5], [6]]
    assert all(batch.keys() == {"labels"} for batch in interleave(shares))


def test_the_example_batch_is_the_first():
    stream = Stream(9)
    assert example_batch(plain_loader(stream), seed=5)["input_ids"].tolist() == [[0], [1]]
    assert stream.num_read == 2
    with pytest.raises(DataError, match="yields no samples"):
        example_batch(plain_loader(Stream(0)), seed=5)
