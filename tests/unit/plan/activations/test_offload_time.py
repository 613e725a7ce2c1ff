"""An iteration with copies to host memory in its way, against the simulator and by hand."""

from __future__ import annotations

import math

import pytest

from merak.plan.activations.offload_time import Work, estimate
from merak.plan.activations.recompute import recomputing_stages
from merak.plan.cost.measured_times import SegmentTimes
from merak.plan.partition import from_sizes
from merak.schedule.changes import recomputing
from merak.schedule.registry import build, names
from merak.schedule.simulator.simulate import simulate
from tests.unit.plan.judges import pipeline_costs


def times(*pairs: tuple[float, float]) -> list[SegmentTimes]:
    return [SegmentTimes("", forward_s, backward_s) for forward_s, backward_s in pairs]


UNEVEN = times((1, 2), (3, 5), (2, 4), (1, 1), (4, 9), (2, 3), (1, 2), (5, 8))


@pytest.mark.parametrize("name", names())
def test_without_copies_it_is_the_simulators(name: str) -> None:
    schedule = build(name, 2, 4)
    sizes = (8,) if schedule.num_stages == 1 else (8 // schedule.num_stages,) * schedule.num_stages
    partition = from_sizes(sizes, 8)
    kept = frozenset({0, 2, 3, 6, 7})
    schedule = recomputing(schedule, recomputing_stages(partition, kept))
    again = {i: UNEVEN[i].forward_s for i in set(range(8)) - kept}
    found = estimate(schedule, Work(partition, UNEVEN, again, {}, math.inf))
    expected = simulate(schedule, pipeline_costs(partition, UNEVEN, kept))
    busy = (expected.end - expected.start).reshape(-1)
    if schedule.is_synchronous:  # others wait for updates inside, which cost nothing here
        assert found.iteration_s == pytest.approx(expected.makespan)
    assert sum(found.busy_s) == pytest.approx(float(busy.sum()))
    assert [len(own) for own in found.starts_s] == [len(own) for own in schedule.actions]


def one_rank(
    moved: dict[int, int], rate: float, name: str = "gpipe", count: int = 2
) -> tuple[float, tuple[float, ...]]:
    partition = from_sizes((3,), 3)
    work = Work(partition, times((1, 2), (1, 2), (1, 2)), {}, moved, rate)
    found = estimate(build(name, 1, count), work)
    return found.iteration_s, found.starts_s[0]


def test_copies_that_are_shorter_than_the_computation_beside_them_are_free() -> None:
    assert one_rank({0: 10, 1: 10}, math.inf)[0] == 18
    # A forward of another segment, of 1 s, is beside every copy out.
    assert one_rank({0: 10, 1: 10}, 10.0)[0] == 18


def test_a_copy_out_that_takes_longer_holds_up_the_segment_after_the_next() -> None:
    # Segment 0 leaves from 1 to 3.5 s; segment 1 has ended at 2, and segment 2 waits until 3.5.
    seconds, starts = one_rank({0: 25}, 10.0, count=1)
    assert starts == (0.0, 4.5)
    # It comes back while segment 1 goes backward, from 6.5 to 9; its own backward ends at 11.
    assert seconds == 11.0


def test_copies_in_one_direction_queue_up() -> None:
    # Out: 0 from 1 to 3, 1 from 3 to 5. Segment 2 runs from 3 to 4 and waits for it until 5.
    # Back: 1 from 5 while 2 goes backward, to 7; 0 from 7 to 9, as 1's backward ends.
    assert one_rank({0: 20, 1: 20}, 10.0, count=1)[0] == 11.0


def test_what_is_needed_at_once_stays() -> None:
    """The last segment's backward is next: its copy is never awaited."""
    assert one_rank({2: 10**6}, 1.0, count=1)[0] == 9.0


def test_what_comes_back_begins_in_the_action_before() -> None:
    # Both microbatches' forwards, 6 s; the last segment of the second is wanted at once, that of
    # the first leaves from 3 to 4 and comes back while the second's backward runs.
    assert one_rank({2: 10}, 10.0)[0] == 18.0


def test_a_part_that_is_kept_is_not_computed_again() -> None:
    partition, schedule = from_sizes((2,), 2), recomputing(build("gpipe", 1, 3), (True,))
    pair = times((2, 4), (2, 4))
    whole, part = (
        estimate(schedule, Work(partition, pair, {1: seconds}, {}, 1.0)).iteration_s
        for seconds in (2.0, 0.5)
    )
    assert (whole, part) == (36 + 6, 36 + 1.5)
