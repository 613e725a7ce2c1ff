"""Idle times of a measured step, and the same step replayed: checked by steps of known times."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from merak.record.idle import Cause, critical_path, idle_by_cause, idle_times, transfer_s
from merak.record.replay import even, measured_costs, replay, typical_step
from merak.record.run import MeasuredStep
from merak.schedule.costs import Link, stage_costs
from merak.schedule.ir import parse_action
from merak.schedule.registry import build, names
from merak.schedule.simulator.simulate import simulate
from tests.unit.record.runs import step_of

COSTS = stage_costs((1.0, 1.0), (2.0, 2.0))


@pytest.mark.parametrize("name", [name for name in names() if name != "auto"])
def test_busy_and_idle_fill_a_step(name: str) -> None:
    schedule = build(name, 4, 8)
    count = schedule.num_stages
    costs = stage_costs((1.0,) * count, (2.0,) * count, links=(Link(0.25),) * (count - 1))
    step = step_of(schedule, costs, ahead_s=0.5)
    idle = idle_times(step)
    for rank in range(4):
        busy = sum(end - start for _, start, end in step.records[rank])
        whole = sum(idle_by_cause(idle, rank).values())
        assert busy + whole == pytest.approx(step.pipeline_s)
    assert all(own.seconds > 0 for own in idle)


def test_the_causes_of_a_small_pipeline() -> None:
    step = step_of(build("1f1b", 2, 2), COSTS)
    # Backwards recompute first. Rank 0: F0@0 F1@1 B0@5 B1@9; rank 1: F0@1 B0@2 F1@5 B1@6; the end
    # is 12.
    found = idle_times(step)
    assert idle_by_cause(found, 0) == pytest.approx(
        {Cause.FILL: 0, Cause.DRAIN: 0, Cause.WAIT: 4, Cause.TRANSFER: 0, Cause.HOST: 0}
    )
    assert idle_by_cause(found, 1) == pytest.approx(
        {Cause.FILL: 1, Cause.DRAIN: 3, Cause.WAIT: 0, Cause.TRANSFER: 0, Cause.HOST: 0}
    )
    waits = [own for own in found if own.cause is Cause.WAIT]
    assert [(own.awaited, own.on) for own in waits] == [
        (parse_action("1B0"), 1), (parse_action("1B1"), 1)
    ]  # fmt: skip


def test_transfers_and_the_host_are_told_apart() -> None:
    costs = stage_costs((1.0, 1.0), (2.0, 2.0), links=(Link(0.25),))
    step = step_of(build("1f1b", 2, 4), costs)
    assert transfer_s(step) == pytest.approx({0: 0.25})
    assert idle_by_cause(idle_times(step), 0)[Cause.TRANSFER] > 0
    # Rank 1 takes half a second for itself before its second forward, whose input is there.
    late = delayed(step_of(build("1f1b", 2, 2), COSTS), 1, 2, 0.5)
    assert idle_by_cause(idle_times(late), 1)[Cause.HOST] == pytest.approx(0.5)


def delayed(step: MeasuredStep, rank: int, place: int, by_s: float) -> MeasuredStep:
    """A step in which a rank's actions from a place on are late."""
    rows = list(step.records)
    rows[rank] = tuple(
        (action, start + by_s * (index >= place), end + by_s * (index >= place))
        for index, (action, start, end) in enumerate(rows[rank])
    )
    return replace(step, records=tuple(rows))


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble_v", "interleaved_1f1b", "chimera"])
def test_the_critical_path_has_no_gap(name: str) -> None:
    schedule = build(name, 4, 8)
    count = schedule.num_stages
    step = step_of(schedule, stage_costs((1.0,) * count, (2.0,) * count))
    times = {action: (start, end) for own in step.records for action, start, end in own}
    path = critical_path(step)
    assert times[path[0]][0] == pytest.approx(step.begin_s)
    assert times[path[-1]][1] == pytest.approx(step.begin_s + step.pipeline_s)
    for before, after in pairwise(path):
        assert times[before][1] == pytest.approx(times[after][0])


@pytest.mark.parametrize(
    "name", ["1f1b", "early_recompute", "zero_bubble_h1", "zero_bubble_v", "chimera", "gpipe"]
)
def test_a_replay_takes_as_long_as_the_step(name: str) -> None:
    schedule = build(name, 4, 8)
    count = schedule.num_stages
    costs = stage_costs(
        tuple(1.0 + 0.1 * stage for stage in range(count)),
        tuple(2.0 + 0.3 * stage for stage in range(count)),
    )
    step = step_of(schedule, costs)
    assert replay(step).makespan == pytest.approx(simulate(schedule, costs).makespan)


def test_medians_leave_one_slow_action_out() -> None:
    step = step_of(build("1f1b", 2, 5), COSTS)
    slow = delayed(step, 0, len(step.records[0]), 0.0)
    rows = list(slow.records)
    action, start, end = rows[0][0]
    rows[0] = ((action, start, end + 5.0), *rows[0][1:])
    costs = measured_costs(replace(slow, records=tuple(rows)), transfers=False)
    assert costs.forward_s == pytest.approx((1.0, 1.0))
    assert costs.backward_s == pytest.approx((2.0, 2.0))


def test_equal_stages_have_the_same_sums() -> None:
    found = even(stage_costs((1.0, 3.0), (2.0, 4.0)))
    assert found.forward_s == (2.0, 2.0) and found.backward_s == (3.0, 3.0)


def test_the_typical_step_is_of_median_length_and_of_the_usual_schedule() -> None:
    usual, other = build("1f1b", 2, 4), build("1f1b", 2, 2)
    costs = [stage_costs((s, s), (2 * s, 2 * s)) for s in (3.0, 1.0, 2.0)]
    steps = [step_of(usual, own, number) for number, own in enumerate(costs)]
    steps.append(step_of(other, costs[0], 3))
    assert typical_step(tuple(steps)).step == 2
