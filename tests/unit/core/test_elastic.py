"""Degrees for fewer ranks than a job is written for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from merak.core.elastic import Degrees, check_expert_degree, smaller_degrees
from merak.core.errors import MeshError


@pytest.mark.parametrize(
    ("wanted", "num_ranks", "chosen"),
    [
        ((2, 1, 2), 2, (1, 1, 2)),
        ((4, 2, 2), 8, (2, 2, 2)),
        ((1, 2, 2), 2, (1, 2, 1)),
        ((2, 2, 2), 2, (1, 2, 1)),
        ((1, 4, 1), 2, (1, 2, 1)),
        ((1, 1, 3), 2, (1, 1, 2)),
        ((2, 2, 4), 12, (2, 2, 3)),
        ((4, 2, 2), 12, (3, 2, 2)),
        ((1, 3, 1), 2, None),
        ((1, 1, 2), 3, None),
    ],
)
def test_dp_is_lowered_before_pp_and_pp_before_tp(
    wanted: tuple[int, int, int], num_ranks: int, chosen: tuple[int, int, int] | None
) -> None:
    expected = None if chosen is None else Degrees(*chosen)
    assert smaller_degrees(Degrees(*wanted), num_ranks) == expected


def test_ranks_that_share_tokens_stay_together() -> None:
    assert smaller_degrees(Degrees(4, 1, 1, 2), 4) == Degrees(2, 1, 1, 2)
    assert smaller_degrees(Degrees(1, 1, 1, 4), 2) is None


_DEGREE = st.integers(1, 8)


@given(st.builds(Degrees, _DEGREE, _DEGREE, _DEGREE, _DEGREE), st.integers(1, 64))
def test_smaller_degrees_use_all_ranks_and_grow_nowhere(wanted: Degrees, num_ranks: int) -> None:
    chosen = smaller_degrees(wanted, num_ranks)
    if chosen is not None:
        assert chosen.dp * chosen.tp * chosen.pp * chosen.cp == num_ranks
        assert all(new <= old for new, old in zip(chosen, wanted))
        assert wanted.tp % chosen.tp == 0


def test_degrees_that_nobody_has_take_no_time() -> None:
    """Each is looked at without counting up to it."""
    huge = 10**12
    assert smaller_degrees(Degrees(1, huge, huge), 2) == Degrees(1, 2, 1)
    with pytest.raises(MeshError, match=r"use ep=1, 2, 4, 5, 8, 10, .*, 1000000000000, or tp=3"):
        check_expert_degree(3, Degrees(huge, 1, 1))
