"""The schedule of an evaluation."""

from __future__ import annotations

import pytest

from merak.core.errors import ScheduleError
from merak.schedule.builders.forward_only import forward_only
from merak.schedule.lower import lower
from merak.schedule.steps import Compute, Receive, Send
from merak.schedule.validate.steps import check_steps


def test_every_rank_runs_its_stages_of_each_microbatch_in_turn() -> None:
    schedule = forward_only((0, 1, 1, 0), 2, 2)
    assert schedule.labels(0) == ["0F0", "3F0", "0F1", "3F1"]
    assert schedule.labels(1) == ["1F0", "2F0", "1F1", "2F1"]
    assert not schedule.has_backwards


@pytest.mark.parametrize("stage_ranks", [(0,), (0, 1, 2), (0, 1, 0, 1), (0, 1, 1, 0)])
def test_its_steps_are_forwards_and_transfers_alone(stage_ranks: tuple[int, ...]) -> None:
    schedule = forward_only(stage_ranks, max(stage_ranks) + 1, 5)
    steps = lower(schedule)
    assert {type(step) for own in steps for step in own} <= {Compute, Send, Receive}
    assert not list(check_steps(schedule, steps))


def test_an_evaluation_without_microbatches_has_no_schedule() -> None:
    with pytest.raises(ScheduleError, match="at least 1 microbatch; got 0"):
        forward_only((0,), 1, 0)
