"""Arguments of a batch that are no tensors: told apart, and the same in every batch."""

from typing import Any

import pytest
import torch

from merak.core.errors import DataError
from merak.data import drop_non_tensors, split_non_tensors


def test_a_batch_is_parted_into_columns_and_plain_arguments() -> None:
    ids = torch.ones(2, 3)
    plain = {"return_loss": True, "task": "sort", "scale": 0.5, "depth": 2, "mask": None}
    columns, found = split_non_tensors({"input_ids": ids, **plain})
    assert list(columns) == ["input_ids"] and columns["input_ids"] is ids
    assert found == plain
    assert list(drop_non_tensors({"input_ids": ids, **plain}, plain)) == ["input_ids"]


@pytest.mark.parametrize(
    ("expected", "given", "said"),
    [
        (
            {"return_loss": True},
            {"return_loss": False},
            "for return_loss=True .* return_loss=False",
        ),
        ({"return_loss": True}, {}, "for return_loss=True .* has no plain return_loss"),
        ({}, {"mask": None}, "for no plain mask and a batch has mask=None"),
        ({"longest": int}, {"longest": "7"}, "for longest=.* and a batch has longest='7'"),
        ({"longest": int}, {}, "has no plain longest"),
    ],
)
def test_other_arguments_than_the_traced_ones_are_refused(
    expected: dict[str, Any], given: dict[str, Any], said: str
) -> None:
    with pytest.raises(DataError, match=said):
        drop_non_tensors({"input_ids": torch.ones(2, 3), **given}, expected)


def test_values_that_nothing_reads_may_change() -> None:
    batch = {"input_ids": torch.ones(2, 3), "longest": 7}
    assert list(drop_non_tensors(batch, {"longest": int})) == ["input_ids"]


@pytest.mark.parametrize("batch", [[torch.ones(2)], (torch.ones(2),), torch.ones(2)])
def test_a_batch_without_names_is_refused(batch: Any) -> None:
    with pytest.raises(DataError, match=rf"the batch is a {type(batch).__name__}, which names no"):
        split_non_tensors(batch)
