"""Times of tensor parallel layers in halves, against a simulation of two queues."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from merak.plan.cost.overlap import Layers, interleaved_s, layer_costs
from merak.schedule.ir import Kind
from merak.schedule.registry import build
from merak.schedule.simulator.simulate import simulate

times = st.floats(0.01, 10.0)
steps = st.lists(st.tuples(times, st.one_of(st.just(0.0), times)), min_size=1, max_size=8)


def gain(layers: Layers) -> float:
    """How many times as fast forward and backward are in sub-microbatches."""
    whole_s, split_s = (layers.forward_s(s) + layers.backward_s(s) for s in (False, True))
    return whole_s / split_s if split_s else 1.0


def paper_s(layers: Layers) -> float:
    """Seconds of forward and backward by the paper's formula for sub-pipelining."""
    compute, communication = layers.compute_s, layers.communication_s
    longest = max(3 * compute, 2 * compute + communication, 2 * communication)
    return 0.75 * compute + 0.5 * communication + (layers.num_layers - 0.25) * longest


def two_queues(work: list[tuple[float, float]], share: float = 0.5) -> float:
    """Halves take turns on one device; their sums follow one another on one link.

    A half's turn lasts until it has started a sum, and begins when its last sum is there.
    """
    device = link = 0.0
    ready = [0.0, 0.0]
    queues = [[(c * part, s * part) for c, s in work] for part in (share, 1 - share)]
    turn = 0
    while any(queues):
        if queues[turn]:
            device = max(device, ready[turn])
        while queues[turn]:
            compute, transfer = queues[turn].pop(0)
            device += compute
            if transfer:
                link = ready[turn] = max(link, device) + transfer
                break
        turn = 1 - turn
    return max(device, link)


@given(steps, st.floats(0.3, 0.7))
def test_halves_last_as_long_as_two_queues(work: list[tuple[float, float]], share: float) -> None:
    assert interleaved_s(work, share) == pytest.approx(two_queues(work, share))


@given(st.integers(1, 12), times, times, times, times)
def test_every_kind_of_action_lasts_as_long_as_two_queues(
    num_layers: int, forward: float, backward: float, again: float, sums: float
) -> None:
    layers = Layers(num_layers, forward, sums, backward, again)
    costs = layer_costs([layers], split=True)
    r, b, i = (again, sums), (backward, sums), (backward / 2, sums)
    (backward_s,), (input_s,) = costs.backward_s, costs.input_gradient_s
    assert costs.forward_s[0] == pytest.approx(two_queues([(forward, sums)] * num_layers))
    assert costs.recompute_s[0] == pytest.approx(two_queues([r] * num_layers))
    assert backward_s == pytest.approx(two_queues([b] * num_layers))
    assert input_s == pytest.approx(two_queues([i] * num_layers))
    assert costs.weight_gradient_s[0] == pytest.approx(backward / 2 * num_layers)
    inside = backward_s + costs.recompute_in_backward_s[0]
    assert inside == pytest.approx(two_queues([r, b] * num_layers))
    inside = input_s + costs.recompute_in_input_gradient_s[0]
    assert inside == pytest.approx(two_queues([r, i] * num_layers))


@given(st.integers(1, 12), times, times)
def test_in_line_all_sums_are_waited_for(num_layers: int, compute: float, sums: float) -> None:
    costs = layer_costs([Layers(num_layers, compute, sums)], split=False)
    assert costs.forward_s[0] == pytest.approx(num_layers * (compute + sums))
    assert costs.backward_s[0] == pytest.approx(num_layers * (2 * compute + sums))
    assert costs.recompute_in_backward_s[0] == pytest.approx(costs.recompute_s[0])


@given(st.integers(1, 24), times, times)
def test_recomputing_in_the_backward_is_the_papers_formula(
    num_layers: int, compute: float, sums: float
) -> None:
    """Recomputation and backward go in one go; the formula is the mean of either coming first."""
    layers = Layers(num_layers, compute, sums)
    other_s = two_queues([(2 * compute, sums), (compute, sums)] * num_layers)
    mean_s = (layers.recomputed_backward_s(True) + other_s) / 2
    assert mean_s == pytest.approx(paper_s(layers))


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble_h1"])
def test_a_simulated_schedule_has_the_times_of_halves(name: str) -> None:
    stages = [Layers(3, 1.0, 0.8), Layers(2, 1.5, 0.8)]
    schedule = build(name, 2, 4)
    for split in (False, True):
        found = simulate(schedule, layer_costs(stages, split))
        lasting = found.end - found.start
        for index, kind in enumerate(found.table.kind):
            own = stages[found.table.stage[index]]
            recomputes = schedule.recompute[found.table.stage[index]]
            expected = {
                Kind.FORWARD: own.forward_s(split),
                Kind.RECOMPUTE: own.recompute_s(split),
                Kind.BACKWARD: own.backward_s(split),
                Kind.INPUT_GRADIENT: own.input_gradient_s(split),
                Kind.WEIGHT_GRADIENT: own.weight_gradient_s(),
            }
            if recomputes:  # nothing recomputes ahead in these schedules
                expected[Kind.BACKWARD] = own.recomputed_backward_s(split)
                expected[Kind.INPUT_GRADIENT] = own.recomputed_input_gradient_s(split)
            assert lasting[index] == pytest.approx(expected[Kind(chr(kind))])


@given(st.integers(1, 12), times, times)
def test_halves_are_never_slower_by_the_model(num_layers: int, compute: float, sums: float) -> None:
    assert gain(Layers(num_layers, compute, sums)) >= 1.0 - 1e-9


def test_the_papers_formula_and_gain_where_both_times_are_equal() -> None:
    layers = Layers(num_layers=24, compute_s=1.0, communication_s=1.0)
    assert paper_s(layers) == pytest.approx(0.75 + 0.5 + 23.75 * 3)
    # The model empties the pipeline between forward and backward, the formula does not.
    model_s = layers.forward_s(True) + layers.backward_s(True)
    assert model_s == pytest.approx(paper_s(layers), rel=0.03)
    assert gain(layers) >= 1.57  # the most that the paper measured


def test_no_layers_take_no_time() -> None:
    assert Layers(0, 1.0, 1.0).forward_s(True) == 0.0
    assert gain(Layers(0, 1.0, 1.0)) == 1.0
