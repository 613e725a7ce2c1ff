"""Training on many ranks against transformers.Trainer alone: losses, gradients and weights."""

from __future__ import annotations

from collections.abc import Callable

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
ONE, TWO = slice(1), slice(0, None, 3)
"""GPT-2, and a model of none of transformers' families beside it."""


@pytest.fixture(scope="module")
def alone(pool: RankPool) -> Callable[[Setup], Outcome]:
    """What one process sees of a job, once for each."""
    known: dict[int, Outcome] = {}

    def of(setup: Setup) -> Outcome:
        if id(setup) not in known:
            ((known[id(setup)],),) = pool.run(train_reference, 1, [setup])
        return known[id(setup)]

    return of


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Traces are shared by all jobs of the module."""
    return str(tmp_path_factory.mktemp("traces"))


@pytest.mark.parametrize(
    ("pp", "setups"), [(2, PLAIN_SETUPS[TWO]), slow(2, PLAIN_SETUPS), slow(4, PLAIN_SETUPS)]
)
def test_pipelines_are_bit_identical(
    pool: RankPool, alone: Callable[[Setup], Outcome], cache: str, pp: int, setups: list[Setup]
) -> None:
    ranks = pool.run(train_merak, pp, (1, 1, pp), setups, cache)
    for number, setup in enumerate(setups):
        assert_identical([rank[number] for rank in ranks], alone(setup))


@pytest.mark.parametrize(
    ("layout", "setups"),
    [
        ((1, 2, 1), CLIPPED_SETUPS[ONE]),
        slow((1, 4, 1), CLIPPED_SETUPS),
        slow((2, 2, 1), CLIPPED_SETUPS),
        slow((2, 1, 2), CLIPPED_SETUPS),
        slow((1, 2, 2), CLIPPED_SETUPS),
        slow((2, 2, 2), CLIPPED_SETUPS),
    ],
)
def test_layouts_equal_one_process(
    pool: RankPool,
    alone: Callable[[Setup], Outcome],
    cache: str,
    layout: Layout,
    setups: list[Setup],
) -> None:
    dp, tp, pp = layout
    ranks = pool.run(train_merak, dp * tp * pp, layout, setups, cache)
    for number, setup in enumerate(setups):
        assert_close([rank[number] for rank in ranks], alone(setup))
