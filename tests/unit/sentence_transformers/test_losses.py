"""Losses as one graph have the values and gradients that they have by themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.multirank.sentence_jobs import OTHERS, TEXTS, encoder, loss_of, save_words

pytest.importorskip("sentence_transformers")

from merak.sentence_transformers.losses import as_one_graph

CACHED = "CachedMultipleNegativesRankingLoss"


@pytest.fixture
def model(tmp_path: Path) -> Any:
    save_words(str(tmp_path / "words"))
    return encoder(str(tmp_path / "words"))


@pytest.mark.parametrize("merges", [False, True])
@pytest.mark.parametrize("name", [CACHED, f"Matryoshka{CACHED}"])
def test_a_cached_loss_is_that_of_the_whole_batch(model: Any, name: str, merges: bool) -> None:
    loss = loss_of(name, model, mini_batch_size=2)

    def run() -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        features = [model.preprocess(list(texts[:3])) for texts in (TEXTS, OTHERS, TEXTS[1:])]
        model.zero_grad()
        value = loss(features, None)
        value.backward()
        return value.detach(), [one.grad for one in model.parameters()]

    expected = run()
    with as_one_graph(merges_columns=merges):
        found = run()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(run(), expected, rtol=0, atol=0)


def test_sizes_that_are_drawn_are_refused_of_a_cached_loss(model: Any) -> None:
    from sentence_transformers.sentence_transformer import losses

    cached = loss_of(CACHED, model, mini_batch_size=2)
    loss = losses.MatryoshkaLoss(model, cached, [32, 16], n_dims_per_step=1)
    features = [model.preprocess(list(texts[:3])) for texts in (TEXTS, OTHERS)]
    with (
        as_one_graph(merges_columns=False),
        pytest.raises(ValueError, match="n_dims_per_step=1 draws sizes anew"),
    ):
        loss(features, None)
