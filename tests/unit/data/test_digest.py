from __future__ import annotations

import pickle

import torch
from accelerate.utils import send_to_device

from merak.data.digest import (
    INDICES,
    DigestedBatch,
    SampleDigests,
    differing,
    digest,
    digest_columns,
    digests_of,
)


def read(columns: dict[str, int], *reads: str) -> SampleDigests:
    return SampleDigests(columns, frozenset(reads))


def test_equal_tensors_have_equal_digests() -> None:
    ids = torch.arange(40).view(4, 10)
    assert digest(ids) == digest(ids.clone())
    assert digest(ids) == digest(ids.t().contiguous().t())
    assert len({digest(ids), digest(ids.flip(0)), digest(ids.view(-1)), digest(ids.int())}) == 4


def test_every_element_type_has_a_digest() -> None:
    for dtype in (torch.bfloat16, torch.bool, torch.complex64, torch.float16, torch.uint8):
        assert digest(torch.ones(3, dtype=dtype)) != digest(torch.zeros(3, dtype=dtype))
    assert digest(torch.tensor(1)) != digest(torch.tensor(2))
    digest(torch.ones(3, device="meta"))
    digest(torch.empty(0))


def test_some_elements_of_a_large_column_count() -> None:
    large = torch.zeros(1 << 20)
    other = large.clone()
    other[1 << 19 :] = 1
    assert digest(large) != digest(other)


def test_a_batch_keeps_its_digests_when_it_is_sent() -> None:
    batch = DigestedBatch({"x": torch.ones(2)}, read({"x": 1, "y": 2}, "x"))
    sent = pickle.loads(pickle.dumps(batch))
    assert digests_of(sent) == batch.samples
    assert digests_of(send_to_device(sent, "cpu")) == batch.samples
    assert list(sent) == ["x"]
    assert not DigestedBatch({}, read({INDICES: 1}))


def test_a_batch_of_another_loader_is_digested() -> None:
    found = digests_of({"x": torch.ones(2), "name": "text"})
    assert found == digest_columns({"x": torch.ones(2)}, ["x", "name"])
    assert list(found.digests) == ["x"]


def test_ranks_that_read_other_columns_of_other_samples_differ() -> None:
    first = read({"input_ids": 1, "labels": 2}, "input_ids")
    last = read({"input_ids": 3, "labels": 4}, "labels")
    assert differing(first, last) == ["input_ids", "labels"]


def test_a_column_that_one_rank_alone_needs_may_differ() -> None:
    first = read({"pixels": 1, "labels": 2}, "pixels")
    last = read({"pixels": 3, "labels": 2}, "labels")
    assert differing(first, last) == []
    both = read({"pixels": 3, "labels": 2}, "pixels", "labels")
    assert differing(first, both) == ["pixels"]


def test_indices_always_count() -> None:
    assert differing(read({INDICES: 1}), read({INDICES: 2}, "x")) == [INDICES]
    assert differing(read({INDICES: 1}), read({})) == []
