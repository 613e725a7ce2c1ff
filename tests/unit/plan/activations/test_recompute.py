from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from merak.core.errors import PlanError
from merak.plan.activations.recompute import (
    PartialSaving,
    RankSegments,
    fill_memory,
    recomputing_stages,
    save_fraction,
)
from merak.plan.partition import Partition, from_sizes
from merak.plan.recompute_spec import Mode, RecomputeSpec, parse_recompute
from merak.schedule.changes import recomputing
from merak.schedule.registry import build, names
from merak.schedule.simulator.simulate import simulate
from merak.schedule.validate.schedule import validate
from tests.unit.plan.judges import pipeline_costs


@dataclass(frozen=True)
class Time:
    forward_s: float
    backward_s: float = 1.0


@pytest.mark.parametrize(
    ("value", "spec"),
    [
        (None, RecomputeSpec(Mode.SCHEDULE)),
        ("off", RecomputeSpec(Mode.FRACTION, 0.0)),
        ("full", RecomputeSpec(Mode.FRACTION, 1.0)),
        ("auto", RecomputeSpec(Mode.AUTO)),
        ("selective", RecomputeSpec(Mode.SELECTIVE)),
        (0.25, RecomputeSpec(Mode.FRACTION, 0.25)),
        ("0.25", RecomputeSpec(Mode.FRACTION, 0.25)),
        (1, RecomputeSpec(Mode.FRACTION, 1.0)),
        ([1, "h.2.mlp"], RecomputeSpec(Mode.SEGMENTS, segments=(1, "h.2.mlp"))),
        ("1, h.2.mlp", RecomputeSpec(Mode.SEGMENTS, segments=(1, "h.2.mlp"))),
        ("3,", RecomputeSpec(Mode.SEGMENTS, segments=(3,))),
        ([], RecomputeSpec(Mode.SEGMENTS)),
    ],
)
def test_what_users_may_say(value, spec):
    assert parse_recompute(value) == spec


@pytest.mark.parametrize("value", ["some", 1.5, "-0.1", "", [1.5], [True], "nan"])
def test_what_makes_no_sense_is_refused(value):
    with pytest.raises(PlanError, match=r"is no choice of what to recompute; use 'off', 'full'"):
        parse_recompute(value)


def test_segments_are_found_by_number_and_name():
    spec = parse_recompute("0,b")
    assert spec.numbers(["a", "b", "c", "b"]) == {0, 1, 3}
    with pytest.raises(PlanError, match="names the segment 'z', but the model's are 0 to 1"):
        parse_recompute(["z"]).numbers(["a", "b"])


def test_a_share_recomputes_what_is_cheap_for_the_memory_it_frees():
    times = [1.0, 4.0, 2.0, 3.0]
    partition = Partition(4, ())
    assert save_fraction(partition, times, [10, 10, 10, 10], 0.5) == {1, 3}
    assert save_fraction(partition, times, [1, 10, 10, 10], 0.5) == {0, 1}
    # A part of a segment counts as a whole one.
    assert save_fraction(partition, times, [10] * 4, 0.3) == {1, 3}
    assert save_fraction(partition, times, [10] * 4, 0.25) == {1, 2, 3}


@given(
    items=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=7),
    budget=st.integers(0, 40),
)
def test_memory_is_filled_with_what_saves_most(items, budget):
    """Against all subsets, where bytes simply add up."""
    numbers = range(len(items))
    position = RankSegments(
        tuple(numbers), tuple(float(s) for s, _ in items), tuple(b for _, b in items)
    )

    def peak_of(saved, selective):
        assert not selective
        return 3 + sum(items[i][1] for i in saved)

    chosen, selective = fill_memory(position, PartialSaving({}, {}), peak_of, budget)
    assert not selective
    fitting = [
        sum(items[i][0] for i in subset)
        for size in range(len(items) + 1)
        for subset in itertools.combinations(numbers, size)
        if peak_of(subset, ()) <= budget
    ]
    assert not chosen or peak_of(chosen, ()) <= budget
    assert sum(items[i][0] for i in chosen) == max(fitting, default=0)


@given(
    items=st.lists(
        st.tuples(st.integers(1, 9), st.integers(2, 9), st.integers(0, 8)), min_size=1, max_size=5
    ),
    budget=st.integers(0, 40),
)
def test_parts_of_segments_never_make_it_worse(items, budget):
    """Selective operators hold less than whole segments; a choice fits, and spares as much."""
    position = RankSegments(
        tuple(range(len(items))),
        tuple(float(s) for s, _, _ in items),
        tuple(b for _, b, _ in items),
    )
    held = {i: min(part, whole - 1) for i, (_, whole, part) in enumerate(items) if part}
    parts = PartialSaving(held, {i: items[i][0] / 2 for i in held})

    def peak_of(saved, selective):
        assert not saved & selective and selective <= frozenset(held)
        return 3 + sum(items[i][1] for i in saved) + sum(held[i] for i in selective)

    def spared(choice):
        return sum(items[i][0] for i in choice[0]) + sum(items[i][0] / 2 for i in choice[1])

    without = fill_memory(position, PartialSaving({}, {}), peak_of, budget)
    chosen = fill_memory(position, parts, peak_of, budget)
    assert chosen == (frozenset(), frozenset()) or peak_of(*chosen) <= budget
    assert spared(chosen) >= spared(without)


def test_parts_are_saved_where_whole_segments_do_not_fit():
    position = RankSegments((4, 5), (10.0, 10.0), (8, 8))
    parts = PartialSaving({4: 2, 5: 2}, {4: 7.5, 5: 5.0})

    def peak_of(saved, selective):
        return 8 * len(saved) + 2 * len(selective)

    assert fill_memory(position, parts, peak_of, 3) == (frozenset(), frozenset({4}))
    assert fill_memory(position, parts, peak_of, 4) == (frozenset(), frozenset({4, 5}))
    assert fill_memory(position, parts, peak_of, 10) == (frozenset({5}), frozenset({4}))
    assert fill_memory(position, parts, peak_of, 16) == (frozenset({4, 5}), frozenset())


def test_costs_count_what_recomputes_alone():
    partition = from_sizes((2, 1), 3)
    times = [Time(1.0, 2.0), Time(3.0, 4.0), Time(5.0, 6.0)]
    costs = pipeline_costs(partition, times, frozenset({1, 2}))
    assert (costs.forward_s, costs.backward_s) == ((4.0, 5.0), (6.0, 6.0))
    assert costs.recompute_s == (1.0, 0.0)
    assert recomputing_stages(partition, frozenset({1, 2})) == (True, False)


SYNCHRONOUS = [name for name in names() if build(name, 4, 8).is_synchronous]


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_any_stages_of_a_schedule_may_recompute(name):
    schedule = build(name, 4, 8)
    flags = [stage % 2 == 0 for stage in range(schedule.num_stages)]
    changed = recomputing(schedule, flags)
    assert validate(changed) == ()
    assert changed.recompute == tuple(flags)


def test_keeping_more_never_takes_longer():
    schedule = build("1f1b", 4, 8, recompute=True)
    partition = from_sizes((3, 3, 3, 3), 12)
    times = [Time(1.0 + i % 3, 2.0) for i in range(12)]
    last = float("inf")
    saved: set[int] = set()
    for index in (3, 10, 0, 5, 6, 1, 2, 4, 7, 8, 9, 11):
        saved.add(index)
        flags = recomputing_stages(partition, frozenset(saved))
        costs = pipeline_costs(partition, times, frozenset(saved))
        makespan = simulate(recomputing(schedule, flags), costs).makespan
        assert makespan <= last
        last = makespan
