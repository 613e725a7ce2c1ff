"""The trainer refuses what does not fit, before it starts, and trains what does."""

from __future__ import annotations

import pytest

from tests.multirank.compare import assert_identical
from tests.multirank.ranks import RankError
from tests.multirank.training import Setup, train_merak, train_reference


def job(**arguments):
    return Setup("gpt2", arguments={"max_steps": 3, **arguments})


def test_a_job_that_does_not_fit_is_refused_on_every_rank(pool, cache):
    with pytest.raises(RankError) as caught:
        pool.run(train_merak, 2, (1, 1, 2), [job(memory_budget=100_000)], cache)
    text = str(caught.value)
    assert "DoesNotFitError: pp rank" in text
    assert "but may hold 100.00 kB" in text


def test_a_job_that_fills_its_budget_trains_as_one_process(pool, cache):
    setups = [job(recompute="auto", memory_budget=900_000), job(recompute="0.5")]
    setups += [job(offload_activations="full")]
    (expected,) = train_reference([job()])
    by_rank = pool.run(train_merak, 2, (1, 1, 2), setups, cache)
    for place, _ in enumerate(setups):
        assert_identical([rank[place] for rank in by_rank], expected)
