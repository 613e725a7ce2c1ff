"""A limit on open sends: no schedule deadlocks for it, and none is slower."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from merak.core.errors import ScheduleError
from merak.schedule.catalog import FORMULAS
from merak.schedule.ir import Schedule
from merak.schedule.lower import lower
from merak.schedule.registry import build
from merak.schedule.steps import MAX_OPEN_SENDS, Receive
from tests.unit.schedule.grid import every_schedule
from tests.unit.schedule.rendezvous import Durations, Run

UNLIMITED = 10**9


def test_no_schedule_deadlocks_whose_sends_are_awaited_at_once() -> None:
    """Fewer open sends never let a rank go further, so this holds for every limit."""
    names = set()
    for schedule in every_schedule((1, 2, 3, 4, 6), (1, 2, 4, 7, 8, 12)):
        names.add(schedule.label)
        assert Run(schedule, lower(schedule), window=0).finish() is not None, schedule.label
    assert len(names) >= len(FORMULAS)


@pytest.mark.parametrize("chunks", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["interleaved_1f1b", "interleaved_zero_bubble"])
def test_nor_with_more_chunks(name: str, chunks: int) -> None:
    for num_ranks, rounds in itertools.product((1, 2, 4), (1, 2, 3)):
        try:
            schedule = build(name, num_ranks, rounds * num_ranks, chunks=chunks)
        except ScheduleError:
            continue
        assert Run(schedule, lower(schedule), window=0).finish() is not None


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(FORMULAS)),
    st.integers(2, 6),
    st.integers(1, 16),
    st.floats(0, 3),
    st.floats(0, 0.7),
    st.integers(0, 10**6),
)
def test_no_schedule_is_slower_for_the_limit(
    name: str, num_ranks: int, num_microbatches: int, latency: float, spread: float, seed: int
) -> None:
    """Whatever actions take: each from a lognormal distribution, transfers up to three forwards."""
    try:
        schedule = build(name, num_ranks, num_microbatches)
    except ScheduleError:
        assume(False)
    durations = Durations(latency, spread, seed)
    limited, unlimited = (_finish(schedule, w, durations) for w in (MAX_OPEN_SENDS, UNLIMITED))
    assert limited <= 1.02 * unlimited


def test_a_limit_of_one_would_be_slower() -> None:
    schedule = build("interleaved_zero_bubble", 8, 16)
    durations = Durations(latency=3.0, spread=0.3)
    assert _finish(schedule, 1, durations) > 1.03 * _finish(schedule, UNLIMITED, durations)


def test_receives_that_are_posted_late_deadlock() -> None:
    """The simulator finds what it looks for: two ranks that each send before they post."""
    schedule = build("1f1b", 2, 4)
    steps = [list(own) for own in lower(schedule)]
    for own in steps:
        posts = [step for step in own if isinstance(step, Receive)]
        own[:] = [step for step in own if not isinstance(step, Receive)] + posts
    assert Run(schedule, steps, window=0).finish() is None


def _finish(schedule: Schedule, window: int, durations: Durations) -> float:
    found = Run(schedule, lower(schedule), window, durations).finish()
    assert found is not None
    return found
