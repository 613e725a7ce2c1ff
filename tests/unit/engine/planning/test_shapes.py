"""Shapes of microbatches of any size."""

from __future__ import annotations

import torch

from merak.data import signature
from merak.engine.planning.shapes import samples_of, tokens_of


def test_columns_with_a_row_a_sample_are_cut() -> None:
    batch = {"mask": torch.ones(4, 4), "ids": torch.ones(4, 12, dtype=torch.long)}
    samples = samples_of(batch, signature(batch).columns, "ids")
    shapes = {name: meta.shape for name, meta in samples.of(2)}
    assert samples.count == 4 and shapes == {"mask": (2, 4), "ids": (2, 12)}
    assert tokens_of(batch, "ids") == (12, 12)


def test_what_all_samples_share_is_left_as_it_is() -> None:
    batch = {"ids": torch.ones(4, 12, dtype=torch.long), "grid": torch.ones(7), "t": torch.ones(())}
    samples = samples_of(batch, signature(batch).columns, "ids")
    assert {name: meta.shape for name, meta in samples.of(1)} == {
        "ids": (1, 12), "grid": (7,), "t": (),
    }  # fmt: skip


def test_pixels_are_no_tokens() -> None:
    assert tokens_of({"pixels": torch.ones(2, 3, 8, 8)}, "pixels") == (1, None)
    assert tokens_of({}, "ids") == (1, None)
