"""auto: against every other schedule, against optima, and within its limits."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from merak.core.errors import ScheduleError
from merak.schedule.catalog import FORMULAS
from merak.schedule.costs import Costs, Link, stage_costs, uniform
from merak.schedule.registry import build, options
from merak.schedule.search.auto import auto
from merak.schedule.simulator.simulate import simulate
from merak.schedule.validate.schedule import validate
from tests.tiers import one_in
from tests.unit.schedule.cp_sat import optimum, random_instance

OPTIMA = Path(__file__).parents[3] / "golden" / "schedule" / "optima.json"
NUM_INSTANCES = 50


@st.composite
def profiles(draw: st.DrawFn) -> tuple[int, int, Costs, float]:
    """P, M, costs of P or 2P uneven stages, and a memory limit that something fits."""
    num_ranks, num_microbatches = draw(st.integers(1, 8)), draw(st.integers(1, 32))
    num_stages = num_ranks * draw(st.sampled_from([1, 1, 2]))
    stages = st.lists(
        st.floats(0.5, 2, allow_subnormal=False), min_size=num_stages, max_size=num_stages
    ).map(tuple)
    gradient, weight = draw(stages), draw(stages)
    costs = stage_costs(
        draw(stages),
        tuple(a + b for a, b in zip(gradient, weight)),
        recompute_s=draw(stages),
        input_gradient_s=gradient,
        weight_gradient_s=weight,
        links=(Link(latency_s=draw(st.sampled_from([0.0, 0.2]))),) * (num_stages - 1),
        checkpoint_bytes=(draw(st.sampled_from([0.1, 1.0])),) * num_stages,
        state_bytes=(0.5,) * num_stages,
    )
    least = 1.5 * num_stages / num_ranks
    return num_ranks, num_microbatches, costs, least + draw(st.floats(0, 2 * num_stages))


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(profiles())
def test_auto_is_never_slower_than_a_schedule_that_fits_as_well(
    profile: tuple[int, int, Costs, float],
) -> None:
    num_ranks, num_microbatches, costs, limit = profile
    schedule = auto(num_ranks, num_microbatches, costs=costs, memory_limit_bytes=limit)
    assert not validate(schedule)
    simulation = simulate(schedule, costs)
    assert max(simulation.peak_memory_bytes) <= limit
    for name in FORMULAS:
        for recompute in (False, True):
            chosen = {"recompute": recompute} if "recompute" in options(name) else {}
            try:
                other = build(name, num_ranks, num_microbatches, **chosen)
            except ScheduleError:
                continue
            if not other.is_synchronous or other.num_stages != costs.num_stages:
                continue
            outcome = simulate(other, costs)
            if max(outcome.peak_memory_bytes) <= limit:
                assert simulation.makespan <= outcome.makespan, name


def solve(seed: int) -> float:
    """The makespan of `auto` on a small instance, which must fit its limit."""
    instance = random_instance(seed)
    schedule = auto(
        instance.num_ranks,
        instance.num_microbatches,
        costs=instance.costs,
        memory_limit_bytes=instance.memory_limit,
        split=instance.split,
        recompute=instance.recompute,
        max_copies=1,
    )
    assert not validate(schedule)
    assert schedule.recompute == instance.recompute
    simulation = simulate(schedule, instance.costs)
    assert max(simulation.peak_memory_bytes) <= instance.memory_limit
    return simulation.makespan


@one_in(10)
@pytest.mark.parametrize("seed", range(NUM_INSTANCES))
def test_auto_is_within_two_percent_of_the_optimum(seed: int) -> None:
    best = json.loads(OPTIMA.read_text(encoding="utf-8"))[seed]
    makespan = solve(seed)
    # Not below it either: the model and the simulator agree on what a schedule is.
    assert best - 1e-6 <= makespan <= 1.02 * best


@one_in(10)
@pytest.mark.parametrize("seed", range(NUM_INSTANCES))
def test_the_recorded_optima_are_what_cp_sat_proves(seed: int) -> None:
    pytest.importorskip("ortools")
    recorded = json.loads(OPTIMA.read_text(encoding="utf-8"))[seed]
    assert optimum(random_instance(seed)) == (recorded, True)


def test_auto_gives_the_same_schedule_every_time() -> None:
    costs = random_instance(7).costs
    ranks = costs.num_stages
    assert auto(ranks, 6, costs=costs) == auto(ranks, 6, costs=costs)


@pytest.mark.parametrize("limit", [1, 2, 3, 4])
def test_auto_keeps_to_the_limit_in_flight(limit: int) -> None:
    costs = uniform(4)
    simulation = simulate(auto(4, 8, costs=costs, memory_limit_bytes=limit), costs)
    assert max(simulation.peak_in_flight) <= limit


def test_more_memory_is_never_slower() -> None:
    costs = uniform(4)
    makespans = [
        simulate(auto(4, 8, costs=costs, memory_limit_bytes=limit), costs).makespan
        for limit in (1, 2, 3, 4, 8)
    ]
    assert makespans == sorted(makespans, reverse=True)
    # One microbatch at a time; and at best all the work after the last rank's wait.
    assert makespans[0] == 8 * (4 + 4 + 1)
    assert makespans[-1] == 3 * 8 + 3


def test_copies_of_the_model_are_bounded() -> None:
    costs = uniform(4)
    copies = [
        len(auto(4, 4, costs=costs, memory_limit_bytes=4, split=False, max_copies=n).pipes)
        for n in (1, 2, 4)
    ]
    assert copies == [1, 2, 4]


def test_auto_recomputes_where_activations_do_not_fit() -> None:
    costs = stage_costs((1.0,) * 4, (2.0,) * 4, checkpoint_bytes=(0.1,) * 4)
    schedule = auto(4, 8, costs=costs, memory_limit_bytes=2.0)
    assert any(schedule.recompute)
    assert simulate(schedule, costs).makespan < 41


def test_auto_lays_several_stages_on_a_rank() -> None:
    costs = uniform(6)
    schedule = auto(3, 6, costs=costs)
    assert schedule.num_ranks == 3 and schedule.num_stages == 6
    assert simulate(schedule, costs).makespan == 6 * 6 + 2


@pytest.mark.parametrize(
    ("chosen", "sentence"),
    [
        (
            {"memory_limit_bytes": 0.5},
            "No schedule fits a memory limit of 0.5; the least that one fits is 1.",
        ),
        ({"costs": uniform(6)}, "on each of 4 ranks; the costs are of 6. Use a multiple of 4."),
        (
            {"costs": stage_costs((1.0,) * 4, (2.0,) * 4, state_bytes=(3.0,) * 4)}
            | {"memory_limit_bytes": 3.5},
            "No schedule fits a memory limit of 3.5; the least that one fits is 4.",
        ),
        (
            {"costs": uniform(8), "memory_limit_bytes": 1.0},
            "No schedule fits a memory limit of 1; the least that one fits is 2.",
        ),
    ],
)
def test_what_nothing_fits_says_the_least_that_would(
    chosen: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ScheduleError, match=re.escape(sentence)):
        auto(4, 8, **chosen)  # type: ignore[arg-type]


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 6), st.integers(1, 10), st.sampled_from([1, 2]), st.booleans())
def test_the_least_limit_is_enough(
    num_ranks: int, num_microbatches: int, stages_per_rank: int, recompute: bool
) -> None:
    num_stages = num_ranks * stages_per_rank
    costs = stage_costs(
        (1.0,) * num_stages,
        (2.0,) * num_stages,
        activation_bytes=(4.0,) * num_stages,
        checkpoint_bytes=(1.0,) * num_stages,
        weight_gradient_bytes=(3.0,) * num_stages,
    )
    flags = (recompute,) * num_stages
    least = 1.0 * stages_per_rank + 3 if recompute else 4.0 * stages_per_rank
    schedule = auto(
        num_ranks, num_microbatches, costs=costs, memory_limit_bytes=least, recompute=flags
    )
    assert max(simulate(schedule, costs).peak_memory_bytes) <= least
