"""Makespans and in-flight counts against their closed forms, over the whole grid."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from merak.core.errors import ScheduleError
from merak.schedule.costs import stage_costs, uniform
from merak.schedule.registry import build
from merak.schedule.simulator.simulate import simulate
from tests.tiers import slow
from tests.unit.schedule.grid import simulated

Counts = list[tuple[int, int]]
"""Of ranks and microbatches."""

GRID: Counts = [(p, m) for p in range(2, 17) for m in range(p, 65)]
FEW: Counts = [(p, m) for p, m in GRID if m - p < 3 or m % 7 == p % 7]
"""Those at the edge, and every seventh of the others, at another place for each number of ranks."""


@pytest.mark.parametrize(
    ("name", "makespan"),
    [
        ("gpipe", lambda p, m: 4 * (m + p - 1)),
        ("1f1b", lambda p, m: 4 * (m + p - 1)),
        ("early_recompute", lambda p, m: 4 * m + 3 * (p - 1)),
        ("last_no_recompute", lambda p, m: 4 * m + 3 * (p - 2) + 1),
        ("zero_bubble_h1", lambda p, m: 3 * m + p - 1),
        ("gems", lambda p, m: m * (2 * p + 1) + p - 1),
    ],
)
@pytest.mark.parametrize("grid", [FEW, slow(GRID)], ids=["few", "all"])
def test_makespans_are_the_closed_forms(
    name: str, makespan: Callable[[int, int], int], grid: Counts
) -> None:
    wrong = [(p, m) for p, m in grid if simulated(name, p, m).makespan != makespan(p, m)]
    assert not wrong


@pytest.mark.parametrize("early_everywhere", [False, True])
@pytest.mark.parametrize("grid", [FEW, slow(GRID)], ids=["few", "all"])
def test_the_shifted_critical_path_reaches_its_lower_bound(
    grid: Counts, early_everywhere: bool
) -> None:
    wrong = []
    for p, m in grid:
        if m < max(4, p):
            continue
        schedule = build("shifted_critical_path", p, m, early_everywhere=early_everywhere)
        assert schedule.name == "shifted_critical_path" and not schedule.notes
        if simulate(schedule, uniform(p)).makespan != 4 * m + 3 * (p - 2):
            wrong.append((p, m))
    assert not wrong


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("grid", [FEW, slow(GRID)], ids=["few", "all"])
def test_without_recomputation_backwards_take_two(name: str, grid: Counts) -> None:
    wrong = [
        (p, m)
        for p, m in grid
        if simulated(name, p, m, recompute=False).makespan != 3 * (m + p - 1)
    ]
    assert not wrong


@pytest.mark.parametrize("chunks", [2, 3])
def test_interleaving_divides_the_bubble_by_the_chunks(chunks: int) -> None:
    for p in range(2, 17):
        for m in range(p, 65, p):
            plain = simulated("interleaved_1f1b", p, m, chunks=chunks, recompute=False)
            assert plain.makespan == 3 * (chunks * m + p - 1)
            split = simulated("interleaved_zero_bubble", p, m, chunks=chunks)
            assert split.makespan == 3 * chunks * m + p - 1


def test_dualpipe_v_leaves_only_the_wait_of_the_last_rank() -> None:
    for p in range(1, 17):
        for m in range(2 * p, 65, 5):
            simulation = simulated("dualpipe_v", p, m)
            assert simulation.makespan == 6 * m + p - 1
            assert max(simulation.peak_in_flight) == 2 * p + 1


def test_zero_bubble_v_is_near_its_lower_bound_in_the_memory_of_1f1b() -> None:
    exact = 0
    cases = [(p, m) for p in range(1, 13) for m in range(2 * p, 41, 5)]
    for p, m in cases:
        simulation = simulated("zero_bubble_v", p, m)
        excess = simulation.makespan - (6 * m + p - 1)
        assert 0 <= excess <= 0.04 * simulation.makespan, (p, m)
        assert max(simulation.peak_in_flight) <= 2 * p
        exact += excess == 0
    assert exact > len(cases) / 2


def test_zb_h2_works_without_a_pause_in_twice_the_memory_of_1f1b() -> None:
    cases = [(p, m) for p in range(1, 13) for m in (2 * p - 1, 2 * p, 5 * p)]
    for p, m in cases:
        simulation = simulated("zb_h2", p, m)
        assert simulation.makespan == 3 * m + p - 1
        assert max(simulation.peak_in_flight) == 2 * p - 1
        starts = simulation.table.starts
        for rank in range(p):
            own = slice(starts[rank], starts[rank + 1])
            worked = simulation.end[own].max() - simulation.start[own].min()
            assert worked == 3 * m, (p, m, rank)


@pytest.mark.parametrize(
    ("name", "idle", "held"),
    [
        ("v_half", lambda p: 3 * p - 4, lambda p: (p + 2) // 2),
        ("v_min", lambda p: 4 * p - 5 + 2 * (p % 3 == 0), lambda p: (p + 4) // 3),
    ],
)
def test_v_patterns_hold_and_idle_as_in_the_paper(
    name: str, idle: Callable[[int], int], held: Callable[[int], int]
) -> None:
    """Of 1F1B's P microbatches and 6 (P - 1) idle moments, about a half, and a third and two."""
    cases = [(p, m) for p in range(3, 20) for m in (p, 2 * p + 1, 3 * p)]
    for p, m in cases:
        simulation = simulated(name, p, m)
        assert simulation.makespan == 6 * m + idle(p), (p, m)
        # A rank has two stages, each of which holds half of what a microbatch leaves on it.
        assert max(simulation.peak_in_flight) == 2 * held(p), (p, m)


@pytest.mark.parametrize("chunks", [2, 3])
def test_breadth_first_has_the_bubble_of_interleaving_for_any_microbatches(chunks: int) -> None:
    for p in range(1, 12):
        for m in range(p, 40, 3):
            plain = simulated("looped_bfs", p, m, chunks=chunks, recompute=False)
            assert plain.makespan == 3 * (chunks * m + p - 1)
            assert plain.peak_in_flight == (chunks * m,) * p


@pytest.mark.parametrize(
    ("name", "in_flight"),
    [
        ("gpipe", lambda p, m, rank: m),
        ("1f1b", lambda p, m, rank: p - rank),
        ("early_recompute", lambda p, m, rank: p - rank),
        ("last_no_recompute", lambda p, m, rank: p - rank),
        ("shifted_critical_path", lambda p, m, rank: p - rank + (rank == p - 2)),
        ("zero_bubble_h1", lambda p, m, rank: p),
        ("gems", lambda p, m, rank: 1),
        ("pipedream", lambda p, m, rank: p - rank),
        ("pipedream_2bw", lambda p, m, rank: p - rank),
    ],
)
def test_in_flight_counts(name: str, in_flight: Callable[[int, int, int], int]) -> None:
    for p, m in GRID[::7]:
        if m < max(4, p):
            continue
        expected = tuple(in_flight(p, m, rank) for rank in range(p))
        assert simulated(name, p, m).peak_in_flight == expected, (p, m)


def test_the_shifted_critical_path_starts_as_in_the_facts_of_the_design() -> None:
    simulation = simulated("shifted_critical_path", 4, 5)
    starts = simulation.table.starts
    timeline = [
        " ".join(
            f"{action.short}@{simulation.start[starts[rank] + i]:g}"
            for i, action in enumerate(actions)
        )
        for rank, actions in enumerate(simulation.schedule.actions)
    ]
    assert timeline == [
        "F0@0 F1@1 F2@2 F3@3 B0@10 F4@13 B1@14 R2@17 B2@18 R3@20 B3@21 R4@23 B4@24",
        "F0@1 F1@2 F2@3 R0@4 B0@8 F3@10 B1@11 F4@14 B2@15 R3@18 B3@19 R4@21 B4@22",
        "F0@2 F1@3 F2@4 R0@5 B0@6 R1@8 B1@9 F3@11 B2@12 F4@15 B3@16 B4@19",
        "F0@3 B0@4 F1@6 B1@7 F2@9 B2@10 F3@12 B3@13 F4@16 B4@17",
    ]


@pytest.mark.parametrize(
    ("num_ranks", "gain_percent"), [(4, 22.2), (8, 20.6), (16, 19.9), (32, 19.5), (64, 19.3)]
)
def test_with_a_long_head_it_gains_what_the_paper_measured(
    num_ranks: int, gain_percent: float
) -> None:
    forward = (*(1.0,) * (num_ranks - 1), 1.2)
    costs = stage_costs(forward, tuple(2 * seconds for seconds in forward))
    num_microbatches = 2 * num_ranks
    plain = simulate(build("1f1b", num_ranks, num_microbatches), costs).makespan
    shifted = simulate(
        build("shifted_critical_path", num_ranks, num_microbatches, early_everywhere=True), costs
    ).makespan
    assert 100 * (1 - shifted / plain) == pytest.approx(gain_percent, abs=0.05)


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(4, 3), (2, 3), (8, 7), (2, 1)])
def test_below_its_range_the_shifted_critical_path_says_what_it_became(
    num_ranks: int, num_microbatches: int
) -> None:
    schedule = build("shifted_critical_path", num_ranks, num_microbatches)
    assert schedule.name == "last_no_recompute"
    assert schedule.notes == (
        f"shifted_critical_path needs {max(4, num_ranks)} microbatches or more with {num_ranks} "
        f"stages; with {num_microbatches} this is last_no_recompute.",
    )
    assert schedule.actions == build("last_no_recompute", num_ranks, num_microbatches).actions


@pytest.mark.parametrize(
    ("name", "num_ranks", "num_microbatches", "options", "sentence"),
    [
        ("gpipe", 0, 4, {}, "gpipe needs at least 1 stage; got 0."),
        ("1f1b", 4, 0, {}, "1f1b needs at least 1 microbatch; got 0."),
        ("shifted_critical_path", 1, 4, {}, "needs at least 2; got 1. Use 1f1b."),
        ("interleaved_1f1b", 4, 6, {}, "multiple of the 4 ranks; got 6. Use 8 microbatches."),
        ("interleaved_1f1b", 4, 8, {"chunks": 1}, "at least 2 chunks per rank; got 1."),
        ("interleaved_zero_bubble", 3, 4, {}, "multiple of the 3 ranks; got 4. Use 6"),
        ("looped_bfs", 2, 4, {"chunks": 1}, "at least 2 chunks per rank; got 1. Use gpipe."),
        ("chimera", 3, 4, {}, "even number of stages; got 3. Use 2 or 4."),
        ("chimera", 1, 4, {}, "even number of stages; got 1. Use 2."),
        ("chimera", 8, 8, {"pairs": 3}, "pairs that divide 4; got 3. Use one of 1, 2, 4."),
        ("chimera", 4, 8, {"method": "x"}, "no method 'x'; use direct, forward_doubling"),
        ("dualpipe_v", 4, 7, {}, "8 microbatches or more on 4 ranks; got 7."),
        ("pipedream_2bw", 4, 3, {}, "at least 4 microbatches per update on 4 stages; got 3"),
        (
            "pipedream_2bw",
            4,
            24,
            {"microbatches_per_update": 5},
            "cannot update every 5; use one of 4, 6, 8, 12, 24.",
        ),
        ("nonesuch", 4, 4, {}, "There is no schedule 'nonesuch'; choose one of: gpipe, 1f1b,"),
        ("1f1b", 4, 4, {"chunks": 2}, "1f1b has no option 'chunks'; its options are: recompute."),
        ("gpipe", 4, 4, {"recompute": 3}, "option recompute is 3; give true or false."),
        ("chimera", 4, 4, {"pairs": True}, "option pairs is True; give a whole number."),
    ],
)
def test_what_is_not_defined_says_for_what_it_is(
    name: str, num_ranks: int, num_microbatches: int, options: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ScheduleError, match=re.escape(sentence)):
        build(name, num_ranks, num_microbatches, **options)


def test_pipedream_stashes_and_2bw_holds_two_versions() -> None:
    pipedream = build("pipedream", 4, 8)
    # Stage s sees its own updates 3 - s microbatches late.
    assert pipedream.weight_versions == tuple(
        tuple(max(0, m - (3 - stage)) for m in range(8)) for stage in range(4)
    )
    assert pipedream.num_updates == 8
    two_versions = build("pipedream_2bw", 4, 16)
    assert two_versions.microbatches_per_update == 4
    assert two_versions.weight_versions == ((0,) * 8 + (1,) * 4 + (2,) * 4,) * 4
