"""Training on many ranks against transformers.Trainer alone: losses, gradients and weights."""

from __future__ import annotations

import pytest

from tests.multirank.compare import assert_close, assert_identical
from tests.multirank.ranks import RankPool
from tests.multirank.training import (
    FAMILIES,
    Layout,
    Outcome,
    Setup,
    train_merak,
    train_reference,
)
from tests.tiers import slow

# 23 batches of 4 and one of 2 in an epoch: the steps at its end have fewer microbatches, the last
# of them fewer samples; 20 steps go over three epochs.
RAGGED = 94
PLAIN_SETUPS = [Setup(family, num_samples=RAGGED) for family in FAMILIES]
CLIPPED_SETUPS = [
    Setup(family, num_samples=RAGGED, arguments={"max_grad_norm": 0.1}) for family in FAMILIES
]


@pytest.fixture(scope="module")
def unclipped(pool: RankPool) -> list[Outcome]:
    (outcomes,) = pool.run(train_reference, 1, PLAIN_SETUPS)
    return list(outcomes)


@pytest.fixture(scope="module")
def clipped(pool: RankPool) -> list[Outcome]:
    (outcomes,) = pool.run(train_reference, 1, CLIPPED_SETUPS)
    return list(outcomes)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Traces are shared by all jobs of the module."""
    return str(tmp_path_factory.mktemp("traces"))


@pytest.mark.parametrize("pp", [2, slow(4)])
def test_pipelines_are_bit_identical(
    pool: RankPool, unclipped: list[Outcome], cache: str, pp: int
) -> None:
    ranks = pool.run(train_merak, pp, (1, 1, pp), PLAIN_SETUPS, cache)
    for number, expected in enumerate(unclipped):
        assert_identical([rank[number] for rank in ranks], expected)


LAYOUTS: list[Layout] = [
    (1, 2, 1), (1, 4, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2),
]  # fmt: skip
ESSENTIAL = {(1, 2, 1)}


@pytest.mark.parametrize(
    "layout",
    [layout if layout in ESSENTIAL else slow(layout) for layout in LAYOUTS],
    ids=lambda layout: "x".join(map(str, layout)),
)
def test_layouts_equal_one_process(
    pool: RankPool, clipped: list[Outcome], cache: str, layout: Layout
) -> None:
    dp, tp, pp = layout
    ranks = pool.run(train_merak, dp * tp * pp, layout, CLIPPED_SETUPS, cache)
    for number, expected in enumerate(clipped):
        assert_close([rank[number] for rank in ranks], expected)
