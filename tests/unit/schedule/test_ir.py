"""Actions and schedules."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from merak.core.errors import ScheduleError
from merak.schedule.ir import Action, Kind, parse_action
from merak.schedule.registry import build

ACTIONS = st.builds(Action, st.sampled_from(Kind), st.integers(0, 999), st.integers(0, 9999))


@given(ACTIONS)
def test_actions_read_back_from_their_text(action: Action) -> None:
    assert parse_action(str(action)) == action
    assert parse_action(action.short, only_stage=action.stage) == action


@pytest.mark.parametrize("text", ["", "X1", "F", "1F", "F-1", "1F0 ", "f0"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(f"{text!r} is not an action; write a kind")):
        parse_action(text, only_stage=0)


def test_a_stage_is_asked_for_where_there_are_several() -> None:
    with pytest.raises(ScheduleError, match="'B3' names no stage, and its rank holds several"):
        parse_action("B3")


def test_placement_of_a_replicated_schedule() -> None:
    schedule = build("chimera", 4, 4)
    assert schedule.stages_of(1) == (1, 2)
    assert schedule.ranks_of(1) == (1, 2)
    assert [schedule.rank_of(1, microbatch) for microbatch in range(4)] == [1, 1, 2, 2]
    assert schedule.label(Action(Kind.FORWARD, 1, 0)) == "1F0"


def test_placement_of_a_v_shape() -> None:
    schedule = build("zero_bubble_v", 3, 6)
    assert schedule.num_stages == 6
    assert [schedule.stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]


def test_updates_of_an_asynchronous_schedule() -> None:
    schedule = build("pipedream_2bw", 2, 6, microbatches_per_update=3)
    assert not schedule.is_synchronous
    assert schedule.num_updates == 2
    assert [schedule.update_of(m) for m in range(6)] == [0, 0, 0, 1, 1, 1]
    assert build("1f1b", 2, 6).weight_version(1, 5) == 0
