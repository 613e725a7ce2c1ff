"""The simulator: times, transfers, reductions, memory and the critical path."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from merak.core.errors import ScheduleError
from merak.schedule.catalog import FORMULAS
from merak.schedule.costs import Costs, Link, stage_costs, uniform
from merak.schedule.ir import Kind, Schedule
from merak.schedule.registry import build
from merak.schedule.serialize import from_text
from merak.schedule.simulator.simulate import Simulation, simulate
from tests.unit.schedule.grid import simulated


def spans(simulation: Simulation) -> dict[str, tuple[float, float]]:
    """Start and end by action."""
    actions = [str(action) for own in simulation.schedule.actions for action in own]
    return dict(zip(actions, zip(simulation.start.tolist(), simulation.end.tolist())))


def two_stages(**others: object) -> Costs:
    return stage_costs((1.0, 1.0), (2.0, 2.0), **others)


def one_way(num_microbatches: int) -> Schedule:
    """Two ranks that run all forwards, then all backwards, keeping activations."""
    return build("gpipe", 2, num_microbatches, recompute=False)


def test_a_transfer_takes_latency_and_bytes_over_bandwidth() -> None:
    links = (Link(latency_s=0.5, bandwidth_bytes_per_s=10.0),)
    simulation = simulate(one_way(1), two_stages(links=links, boundary_bytes=(5.0,)))
    assert spans(simulation) == {"0F0": (0, 1), "1F0": (2, 3), "1B0": (3, 5), "0B0": (6, 8)}


def test_transfers_queue_up_on_a_link_but_latencies_do_not() -> None:
    slow = (Link(bandwidth_bytes_per_s=1.0),)
    simulation = simulate(one_way(3), two_stages(links=slow, boundary_bytes=(3.0,)))
    assert [spans(simulation)[f"1F{m}"][0] for m in range(3)] == [4, 7, 10]
    far = (Link(latency_s=3.0),)
    simulation = simulate(one_way(3), two_stages(links=far))
    assert [spans(simulation)[f"1F{m}"][0] for m in range(3)] == [4, 5, 6]


def test_without_overlap_the_sender_waits_for_its_transfer() -> None:
    links = (Link(latency_s=0.5),)
    simulation = simulate(one_way(2), two_stages(links=links, overlap=False))
    assert [spans(simulation)[f"0F{m}"] for m in range(2)] == [(0, 1), (1.5, 2.5)]
    overlapped = simulate(one_way(2), two_stages(links=links))
    assert [spans(overlapped)[f"0F{m}"] for m in range(2)] == [(0, 1), (1, 2)]
    assert simulation.makespan > overlapped.makespan


def test_stages_on_one_rank_transfer_nothing() -> None:
    costs = uniform(4, transfer_s=100.0)
    turn = spans(simulate(build("zero_bubble_v", 2, 1), costs))
    assert turn["2F0"][0] == turn["1F0"][1]
    assert turn["1F0"][0] == turn["0F0"][1] + 100


def test_a_backward_recomputes_inside_unless_it_has_its_own_r() -> None:
    text = "name: mine\nmicrobatches: 1\nrecompute: {}\nrank 0: F0 {}"
    kept = simulate(from_text(text.format("no", "B0")), uniform(1))
    inside = simulate(from_text(text.format("yes", "B0")), uniform(1, recompute_s=5.0))
    apart = simulate(from_text(text.format("yes", "R0 B0")), uniform(1, recompute_s=5.0))
    split = simulate(from_text(text.format("yes", "I0 W0")), uniform(1, recompute_s=5.0))
    assert [s.makespan for s in (kept, inside, apart, split)] == [3, 8, 8, 8]
    assert spans(inside)["0B0"] == (1, 8)
    assert spans(apart)["0B0"] == (6, 8)
    assert spans(split)["0I0"] == (1, 7)


def test_eager_reductions_run_beside_the_actions() -> None:
    costs = replace(uniform(4), reduction_s=(2.0,) * 4)
    simulation = simulate(build("chimera", 4, 4), costs)
    ends = spans(simulation)
    by_stage = {reduction.stage: reduction for reduction in simulation.reductions}
    # Ranks 0 and 3 finish stage 3 together, and reduce it while they still compute.
    assert by_stage[3].start == max(ends["3B1"][1], ends["3B3"][1]) < ends["0B1"][0]
    assert by_stage[3].ranks == (0, 3)
    # Middle stages wait for the end of their ranks, and for one another.
    assert by_stage[1].start == ends["1B1"][1]
    assert by_stage[2].start == by_stage[1].end
    assert simulation.makespan == max(reduction.end for reduction in simulation.reductions) == 18


def test_lazy_reductions_start_after_the_last_action() -> None:
    schedule = replace(build("chimera", 4, 4), eager_reduction=(False,) * 4)
    costs = replace(uniform(4), reduction_s=(2.0,) * 4)
    starts = {
        reduction.stage: reduction.start for reduction in simulate(schedule, costs).reductions
    }
    assert starts[3] == 16
    assert simulate(schedule, costs).makespan == 20


def test_asynchronous_updates_hold_their_rank_while_they_reduce() -> None:
    schedule = build("pipedream_2bw", 1, 4, microbatches_per_update=2)
    costs = replace(uniform(1), reduction_s=(5.0,))
    assert simulate(schedule, costs).makespan == 4 * 3 + 2 * 5


def test_memory_counts_checkpoints_activations_states_and_stashed_versions() -> None:
    costs = stage_costs(
        (1.0,) * 2,
        (2.0,) * 2,
        activation_bytes=(10.0,) * 2,
        checkpoint_bytes=(1.0,) * 2,
        weight_gradient_bytes=(4.0,) * 2,
        state_bytes=(100.0,) * 2,
        weight_bytes=(30.0,) * 2,
    )
    kept = simulate(build("1f1b", 2, 4, recompute=False), costs)
    assert kept.peak_memory_bytes == (120, 110)
    # Two checkpoints, and the rest of one microbatch while its backward runs.
    again = simulate(build("1f1b", 2, 4), costs)
    assert again.peak_memory_bytes == (111, 110)
    early = simulate(build("early_recompute", 2, 4), costs)
    assert early.peak_memory_bytes == (111, 110)
    # Rank 1 keeps a weight gradient's share of one microbatch while it forwards the next.
    assert simulate(build("zero_bubble_h1", 2, 4), costs).peak_memory_bytes == (120, 114)
    stashed = simulate(build("pipedream", 2, 4), costs)
    assert stashed.peak_memory_bytes == (100 + 20 + 30, 100 + 10)
    replicas = simulate(build("chimera", 2, 2), costs)
    assert replicas.peak_memory_bytes == (220, 220)


def test_pipedream_holds_p_minus_s_versions_and_2bw_two() -> None:
    nothing = (0.0,) * 4
    costs = replace(uniform(4), activation_bytes=nothing, checkpoint_bytes=nothing)
    costs = replace(costs, weight_gradient_bytes=nothing, weight_bytes=(1.0,) * 4)
    assert simulate(build("pipedream", 4, 12), costs).peak_memory_bytes == (3, 2, 1, 0)
    assert simulate(build("pipedream_2bw", 4, 12), costs).peak_memory_bytes == (1, 1, 1, 1)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(sorted(FORMULAS)),
    st.integers(1, 6),
    st.integers(1, 12),
    st.lists(st.floats(0.1, 3), min_size=24, max_size=24),
    st.sampled_from([0.0, 0.5]),
    st.booleans(),
)
def test_the_critical_path_accounts_for_the_makespan(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    times: list[float],
    latency_s: float,
    overlap: bool,
) -> None:
    try:
        schedule = build(name, num_ranks, num_microbatches)
    except ScheduleError:
        assume(False)
    stages = schedule.num_stages
    costs = stage_costs(
        tuple(times[:stages]),
        tuple(times[-stages:]),
        links=(Link(latency_s=latency_s),) * (stages - 1),
        overlap=overlap,
    )
    simulation = simulate(schedule, costs)
    path = simulation.critical_path
    assert simulation.start[path[0]] == 0
    assert simulation.end[path[-1]] == simulation.makespan
    for before, after in itertools.pairwise(path):
        gap = simulation.start[after] - simulation.end[before]
        assert gap == pytest.approx(0) or gap == pytest.approx(latency_s)
    busy = float((simulation.end - simulation.start).sum())
    total = simulation.makespan * schedule.num_ranks
    assert simulation.bubble_fraction == pytest.approx(1 - busy / total)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(FORMULAS)),
    st.integers(1, 6),
    st.integers(1, 12),
    st.lists(st.floats(0, 3), min_size=24, max_size=24),
)
def test_every_action_starts_as_soon_as_rank_and_data_allow(
    name: str, num_ranks: int, num_microbatches: int, times: list[float]
) -> None:
    """Against the definition, action by action, rather than against the simulator's own pass."""
    try:
        schedule = build(name, num_ranks, num_microbatches)
    except ScheduleError:
        assume(False)
    stages = schedule.num_stages
    simulation = simulate(schedule, stage_costs(tuple(times[:stages]), tuple(times[-stages:])))
    ends = {name: end for name, (_, end) in spans(simulation).items()}
    starts = {name: start for name, (start, _) in spans(simulation).items()}
    for own in schedule.actions:
        free = 0.0
        for action in own:
            stage, microbatch = action.stage, action.microbatch
            ready = free
            if action.kind is Kind.FORWARD and stage:
                ready = max(ready, ends[f"{stage - 1}F{microbatch}"])
            if action.kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT) and stage + 1 < stages:
                above = [ends.get(f"{stage + 1}{letter}{microbatch}", 0.0) for letter in "BI"]
                ready = max(ready, *above)
            assert starts[str(action)] == ready
            free = ends[str(action)]


def test_the_critical_path_of_1f1b_lies_on_the_last_stage_and_of_shifted_on_the_one_before() -> (
    None
):
    for name, stage in (("1f1b", 3), ("shifted_critical_path", 2)):
        simulation = simulated(name, 4, 16)
        on_stage = [int(simulation.table.stage[i]) for i in simulation.critical_path]
        assert max(set(on_stage), key=on_stage.count) in (stage, 0)
        assert (3 in on_stage) == (name == "1f1b")


def test_a_million_actions_are_simulated() -> None:
    """The size that the benchmark times; here only that the answer is right."""
    num_ranks, num_microbatches = 128, 700
    simulation = simulated("early_recompute", num_ranks, num_microbatches)
    assert simulation.table.num_actions == 3 * num_ranks * num_microbatches
    assert simulation.makespan == 4 * num_microbatches + 3 * (num_ranks - 1)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"recompute_s": (1.0,)}, "recompute_s has 1 values; 2 stages need 2."),
        ({"links": ()}, "links has 0 values; 2 stages need 1."),
        (
            {"reduction_s": (-1.0, 0.0)},
            "reduction_s is (-1.0, 0.0); times and sizes are 0 or more.",
        ),
        ({"links": (Link(bandwidth_bytes_per_s=0),)}, "latency is 0 or more, bandwidth above 0."),
        ({"checkpoint_bytes": (2.0, 0.0)}, "checkpoint_bytes is (2.0, 0.0), more than all of"),
    ],
)
def test_bad_costs_are_refused(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(sentence)):
        two_stages(**fields)


def test_costs_of_other_stages_are_refused() -> None:
    with pytest.raises(ScheduleError, match="costs are of 2 stages and 1f1b has 4; give one value"):
        simulate(build("1f1b", 4, 4), two_stages())
