"""Batches of several kinds say in the name of a column what they are."""

from __future__ import annotations

import torch

from merak.data import signature
from merak.data.non_tensors import with_kind, without_kind


def test_order_and_arguments_come_back_from_sorted_columns() -> None:
    batch = {"positive_ids": torch.ones(2), "positive_of": "text", "anchor_ids": torch.ones(2)}
    packed = with_kind(batch)
    assert all(isinstance(value, torch.Tensor) for value in packed.values())
    found = without_kind(dict(sorted(packed.items())))
    assert list(found) == list(batch) and found["positive_of"] == "text"


def test_other_columns_come_last_and_missing_ones_are_left_out() -> None:
    packed = with_kind({"b": torch.ones(1), "a": torch.ones(1), "n": 1})
    del packed["b"]
    assert list(without_kind({"count": torch.ones(()), **packed})) == ["a", "n", "count"]


def test_a_batch_without_a_kind_is_as_it_is() -> None:
    assert list(without_kind({"b": 1, "a": 2})) == ["b", "a"]


def test_kinds_have_signatures_of_their_own() -> None:
    one, other, same = (signature(with_kind({"a": torch.ones(1), "of": n})) for n in "xyy")
    assert one != other == same
