"""The probabilities of progressive layer dropping, over steps and depth."""

from __future__ import annotations

import math

import pytest

from merak.core.errors import ArgumentsError
from merak.plan.layer_dropping import kept, kept_at, mean_kept
from merak.plan.options import ParallelOptions


def test_all_blocks_are_kept_at_first_and_fewer_over_time() -> None:
    assert kept(0, 0.5, 0.01) == 1.0
    assert kept(100, 0.5, 0.01) == pytest.approx(0.5 * math.exp(-1) + 0.5)
    assert kept(10**6, 0.5, 0.01) == 0.5
    assert kept(100, 0.5, 0.0) == 1.0


def test_deeper_blocks_are_kept_less() -> None:
    assert [kept_at(i, 4, 0.5) for i in (1, 2, 3, 4)] == [0.875, 0.75, 0.625, 0.5]
    assert mean_kept(4, 0.5) == 0.6875
    assert mean_kept(4, 1.0) == 1.0


@pytest.mark.parametrize("value", [0.0, -0.5, 1.5, math.nan])
def test_what_is_no_probability_is_refused(value: float) -> None:
    with pytest.raises(ArgumentsError, match="no probability to keep blocks; use a number above 0"):
        ParallelOptions(layer_keep=value)
    with pytest.raises(ArgumentsError, match=r"layer_keep_decay=-1.0 is no rate; use a number"):
        ParallelOptions(layer_keep_decay=-1.0)
