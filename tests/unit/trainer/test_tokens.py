from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from merak.trainer.tokens import TOKENS, TokenCounter


def count(batch: Mapping[str, Any]) -> int | None:
    return int((batch["labels"] != -100).sum())


def make(count_labels: Any = count, pad_token: int | None = None) -> TokenCounter:
    return TokenCounter(count_labels, "input_ids", pad_token)


IDS = torch.tensor([[1, 2, 3], [4, 0, 0]])
LABELS = torch.tensor([[1, 2, 3], [4, -100, -100]])
MASK = torch.tensor([[1, 1, 1], [1, 0, 0]])


def test_a_rank_tells_what_it_reads() -> None:
    counter = make()
    assert counter.metadata({"labels": LABELS}) == {"labels": 4}
    assert counter.metadata({"input_ids": IDS}) == {"inputs": 6, "non_padding": 6}
    assert counter.metadata({}) == {}


def test_padding_is_known_by_the_mask_or_the_token() -> None:
    assert make().metadata({"input_ids": IDS, "attention_mask": MASK})["non_padding"] == 4
    assert make(pad_token=0).metadata({"input_ids": IDS})["non_padding"] == 4


def test_a_loss_that_takes_a_count_gets_its_column() -> None:
    signature = make().signature({"input_ids": IDS, "labels": LABELS})
    assert signature.names == ("input_ids", "labels", TOKENS)
    assert signature[TOKENS].shape == ()
    assert make().to_read(("input_ids", TOKENS)) == ("input_ids", "labels")
    assert make().to_read(("labels", TOKENS)) == ("labels",)


def test_a_loss_that_takes_none_gets_none() -> None:
    without = make(count_labels=None)
    assert without.signature({"labels": LABELS}).names == ("labels",)
    assert without.metadata({"labels": LABELS}) == {}
    assert make().signature({"input_ids": IDS}).names == ("input_ids",)


def test_labels_that_cannot_be_counted_are_not_told() -> None:
    assert make(count_labels=lambda batch: None).metadata({"labels": LABELS}) == {}
