"""Layouts among themselves: the same initial weights and the same dropout in all of them."""

from __future__ import annotations

import pytest
import torch

from tests.multirank.compare import assert_close, assert_same_losses_everywhere, whole
from tests.multirank.ranks import RankPool
from tests.multirank.training import FAMILIES, Layout, Outcome, Setup, train_merak
from tests.tiers import slow

DROPPING = [
    Setup(
        family,
        num_samples=46,  # the epoch's last step has fewer and smaller microbatches
        dropout=0.2,
        empty=True,
        padded=family == "deep bert",
        arguments={"max_grad_norm": 0.1, "max_steps": 4},
    )
    for family in FAMILIES
]


@pytest.fixture(scope="module")
def one_rank(pool: RankPool, cache: str) -> list[Outcome]:
    (outcomes,) = pool.run(train_merak, 1, (1, 1, 1), DROPPING, cache)
    return list(outcomes)


@pytest.mark.parametrize(
    "layout",
    [slow((1, 2, 1)), slow((1, 1, 4)), slow((2, 2, 2))],
    ids=lambda x: "x".join(map(str, x)),
)
def test_layouts_agree_with_dropout_from_empty_weights(
    pool: RankPool, one_rank: list[Outcome], cache: str, layout: Layout
) -> None:
    dp, tp, pp = layout
    ranks = pool.run(train_merak, dp * tp * pp, layout, DROPPING, cache)
    for number, expected in enumerate(one_rank):
        own = [rank[number] for rank in ranks]
        assert_close(own, expected)
        if dp * tp == 1:
            assert_same_losses_everywhere(own)
            final = whole(own, "final")
            for name, value in expected.final.items():
                # The clip norm is summed in another order; Adam's steps are about 1e-2 long.
                assert torch.allclose(final[name], value, atol=1e-4), name


@pytest.mark.slow
def test_dropout_drops(pool: RankPool, one_rank: list[Outcome], cache: str) -> None:
    still = [Setup("deep bert", num_samples=46, empty=True, arguments=DROPPING[2].arguments)]
    ((without,),) = pool.run(train_merak, 1, (1, 1, 1), still, cache)
    assert without.losses[0] != pytest.approx(one_rank[2].losses[0], rel=1e-4)
    assert torch.equal(
        without.initial["bert.embeddings.word_embeddings.weight"],
        one_rank[2].initial["bert.embeddings.word_embeddings.weight"],
    )
