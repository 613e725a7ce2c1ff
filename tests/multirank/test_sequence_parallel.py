"""Sequence parallelism on real ranks gives what one process gives."""

from __future__ import annotations

import pytest

from tests.multirank.compare import assert_close
from tests.multirank.ranks import RankPool
from tests.multirank.training import Setup, train_merak

SHARED = {"sequence_parallel": True, "max_steps": 3}
SETUPS = [
    Setup("gpt2", dropout=0.1, num_samples=32, arguments={**SHARED, "max_grad_norm": 0.5}),
    Setup("llama", num_samples=32, arguments=SHARED),
    Setup("bert", dropout=0.1, num_samples=32, arguments={**SHARED, "recompute": "full"}),
    Setup("plain", dropout=0.1, num_samples=32, arguments=SHARED),
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Traces are shared by all jobs of the module."""
    return str(tmp_path_factory.mktemp("traces"))


@pytest.mark.parametrize("layout", [(1, 2, 1), (1, 2, 2)])
def test_ranks_equal_one_process(pool: RankPool, cache: str, layout: tuple[int, int, int]) -> None:
    # Merak on one rank, which draws dropout as every layout does.
    (expected,) = pool.run(train_merak, 1, (1, 1, 1), SETUPS, cache)
    dp, tp, pp = layout
    ranks = pool.run(train_merak, dp * tp * pp, layout, SETUPS, cache)
    for i, wanted in enumerate(expected):
        assert_close([rank[i] for rank in ranks], wanted)
