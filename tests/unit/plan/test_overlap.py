"""Times of tensor parallel layers in halves, against a simulation of two queues."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from merak.plan.overlap import Layers

times = st.floats(0.01, 10.0)


def two_queues(num_layers: int, compute_s: float, communication_s: float) -> float:
    """Halves take turns on one device; their sums follow one another on one link."""
    device = link = 0.0
    ready = [0.0, 0.0]
    for _ in range(num_layers):
        for half in range(2):
            device = max(device, ready[half]) + compute_s / 2
            link = max(link, device) + communication_s / 2
            ready[half] = link
    return max(ready)


@given(st.integers(1, 12), times, times)
def test_the_model_is_that_of_two_queues(num_layers: int, compute: float, sums: float) -> None:
    layers = Layers(num_layers, compute, sums)
    assert layers.forward_s(True) == pytest.approx(two_queues(num_layers, compute, sums))
    assert layers.backward_s(True) == pytest.approx(two_queues(num_layers, 2 * compute, sums))
    assert layers.forward_s(False) == pytest.approx(num_layers * (compute + sums))


@given(st.integers(1, 12), times, times)
def test_halves_are_never_slower_by_the_model(num_layers: int, compute: float, sums: float) -> None:
    assert Layers(num_layers, compute, sums).gain() >= 1.0 - 1e-9


def test_the_papers_formula_and_gain_where_both_times_are_equal() -> None:
    layers = Layers(num_layers=24, compute_s=1.0, communication_s=1.0)
    assert layers.paper_s() == pytest.approx(0.75 + 0.5 + 23.75 * 3)
    # The model empties the pipeline between forward and backward, the formula does not.
    model_s = layers.forward_s(True) + layers.backward_s(True)
    assert model_s == pytest.approx(layers.paper_s(), rel=0.03)
    assert layers.gain() >= 1.57  # the most that the paper measured


def test_no_layers_take_no_time() -> None:
    assert Layers(0, 1.0, 1.0).forward_s(True) == 0.0
    assert Layers(0, 1.0, 1.0).gain() == 1.0
