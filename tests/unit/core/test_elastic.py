"""Degrees for fewer ranks than a job is written for, and degrees from outside of a script."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from merak.core.elastic import (
    Degrees,
    GivenDegrees,
    check_expert_degree,
    joined_plan,
    on_command_line,
    smaller_degrees,
)
from merak.core.errors import MeshError, PlanError


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


def test_degrees_from_outside_fill_what_a_script_leaves_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not any(GivenDegrees.from_outside())
    monkeypatch.setenv("MERAK_TP", "2")
    monkeypatch.setenv("MERAK_PP", "")
    outside = GivenDegrees.from_outside()
    assert outside == GivenDegrees(tp=2)
    assert GivenDegrees(pp=4).joined(outside) == GivenDegrees(tp=2, pp=4)
    assert GivenDegrees(tp=2).joined(outside) == outside
    with pytest.raises(MeshError, match="the script has tp=1 and MERAK_TP is 2; leave tp out of"):
        GivenDegrees(tp=1).joined(outside)
    for text in ("0", "two", "-1", "2.0"):
        monkeypatch.setenv("MERAK_CP", text)
        with pytest.raises(MeshError, match=f"MERAK_CP='{text}' is not a degree; give a whole"):
            GivenDegrees.from_outside()


def test_the_command_line_counts_by_exact_names(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["train.py", "--tp-size", "7", "--tp", "2", "--pp=4", "--d", "3", "--plan"]
    monkeypatch.setattr("sys.argv", words)
    assert not any(GivenDegrees.from_outside())
    assert GivenDegrees.from_outside(reads_command_line=True) == GivenDegrees(tp=2, pp=4)
    assert on_command_line("plan") is None  # nothing follows it
    monkeypatch.setenv("MERAK_TP", "8")
    assert GivenDegrees.from_outside(reads_command_line=True) == GivenDegrees(tp=8, pp=4)
    monkeypatch.setattr("sys.argv", ["train.py", "--ep", "all"])
    with pytest.raises(MeshError, match="--ep='all' is not a degree; give a whole number of 1 or"):
        GivenDegrees.from_outside(reads_command_line=True)


def test_replicas_are_as_many_as_the_ranks_make() -> None:
    assert GivenDegrees(tp=2).with_replicas(8) == GivenDegrees(4, 2)
    assert GivenDegrees(tp=2).with_replicas(7) == GivenDegrees(tp=2)  # which is refused later
    assert GivenDegrees(1, 2).with_replicas(8) == GivenDegrees(1, 2)


def test_a_plan_from_outside_counts_where_the_script_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert joined_plan(None) is None and joined_plan("plan.json") == "plan.json"
    monkeypatch.setenv("MERAK_PLAN", "/plans/plan.json")
    assert joined_plan(None) == joined_plan("/plans/plan.json") == "/plans/plan.json"
    with pytest.raises(PlanError, match=r"the script has plan='auto' and MERAK_PLAN is '/plans/"):
        joined_plan("auto")
