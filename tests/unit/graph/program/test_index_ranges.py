"""Indices of a batch, held against the tables that they are looked up in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from merak.core.tensor_meta import TensorMeta
from merak.graph.program.index_ranges import IndexRange, find_index_ranges, out_of_range
from merak.graph.segment.build import GraphSource, build_graph

IDS = TensorMeta((2, 6), torch.int64)


class Lookup(nn.Module):
    """A table of 8 rows and a loss over 5 classes; `change` is between a column and its use."""

    def __init__(self, change: str = "none") -> None:
        super().__init__()
        self.change = change
        self.table = nn.Embedding(8, 4, padding_idx=0)
        self.head = nn.Linear(4, 5)

    def forward(self, ids: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = self.head(self.table(_CHANGES[self.change](ids, mask)))
        if self.change == "shifted":
            labels = functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        if self.change == "soft":
            return functional.cross_entropy(scores.flatten(0, 1), functional.one_hot(
                labels.view(-1), 5).float())  # fmt: skip
        return functional.cross_entropy(scores.view(-1, 5), labels.view(-1), ignore_index=-100)


_CHANGES: dict[str, Any] = {
    "none": lambda ids, mask: ids,
    "shifted": lambda ids, mask: ids,
    "soft": lambda ids, mask: ids,
    "viewed": lambda ids, mask: ids.unsqueeze(0).transpose(1, 2).reshape(6, 2).t().to(torch.int32),
    "masked": lambda ids, mask: ids.masked_fill(ids == -100, 0),
    "masked in place": lambda ids, mask: ids.clone().masked_fill_(ids == -100, 0),
    "chosen": lambda ids, mask: torch.where(mask > 0, ids, 0),
    "clamped": lambda ids, mask: ids.clamp(0, 7),
    "remainder": lambda ids, mask: ids % 8,
    "cut off": lambda ids, mask: torch.cat((ids[:, 1:], ids[:, 1:2]), 1),
}


def ranges_of(change: str, training: bool = True) -> tuple[IndexRange, ...]:
    columns = {"ids": IDS, "labels": IDS} | ({"mask": IDS} if change == "chosen" else {})
    return find_index_ranges(build_graph(GraphSource(Lookup(change)), columns, training=training))


def batch_of(ids: int = 1, labels: int = 1, place: int = 4, **more: Tensor) -> dict[str, Tensor]:
    """Ones, but for one index of each column."""
    made = {"ids": torch.ones(2, 6, dtype=torch.int64), "labels": torch.ones(2, 6).long()}
    made["ids"][1, place], made["labels"][1, place] = ids, labels
    return made | more


def fails(change: str, batch: dict[str, Tensor]) -> bool:
    try:
        Lookup(change)(**batch)
    except (IndexError, RuntimeError):
        return True
    return False


@pytest.mark.parametrize("change", list(_CHANGES))
@pytest.mark.parametrize("ids", [0, 7, 8, -1, -100])
@pytest.mark.parametrize("place", [0, 4])
def test_what_is_refused_fails_in_the_model(change: str, ids: int, place: int) -> None:
    batch = batch_of(ids, place=place)
    for mask in (0, 1) if change == "chosen" else (None,):
        if mask is not None:
            batch["mask"] = torch.full((2, 6), mask)
        problem = out_of_range(_known(change), batch)
        if change in ("masked in place", "remainder"):
            assert problem is None  # not plain to see; the look-up itself refuses it
        else:
            assert (problem is not None) == fails(change, batch)


_KNOWN: dict[str, tuple[IndexRange, ...]] = {}


def _known(change: str) -> tuple[IndexRange, ...]:
    """Traced once for all of a change's cases."""
    if change not in _KNOWN:
        _KNOWN[change] = ranges_of(change)
    return _KNOWN[change]


def test_the_sentence() -> None:
    found = ranges_of("none")
    assert out_of_range(found, batch_of(9)) == (
        "column 'ids' holds the index 9, but table.weight of 8 rows takes 0 to 7; use the "
        "tokenizer or labels that the model is made for, or a model with room for it."
    )
    assert out_of_range(found, batch_of(labels=5)) == (
        "column 'labels' holds the index 5, but the loss over 5 classes takes 0 to 4 (and -100, "
        "which does not count); use the tokenizer or labels that the model is made for, or a "
        "model with room for it."
    )
    assert out_of_range(found, batch_of(labels=-1)) is not None
    assert out_of_range(found, batch_of(labels=-100)) is None
    assert out_of_range(found, {"labels": batch_of()["labels"]}) is None  # as far as a rank reads


def test_shifted_labels() -> None:
    found = ranges_of("shifted")
    assert out_of_range(found, batch_of(labels=5, place=0)) is None  # which no position predicts
    said = out_of_range(found, batch_of(labels=5, place=3))
    assert said is not None and "column 'labels' gives the index 5" in said


def test_soft_labels_are_no_indices() -> None:
    assert [one.columns for one in ranges_of("soft")] == [("ids",)]


def test_evaluation_is_looked_at_too() -> None:
    assert {one.columns for one in ranges_of("none", training=False)} == {("ids",), ("labels",)}
