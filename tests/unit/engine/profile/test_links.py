"""Interference of a collective with the computation beside it, from what a stopwatch says."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from merak.engine.profile import links


class Watch:
    """Says seconds in the order of the measurements, and runs nothing."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = list(seconds)

    def together(self, work: object, group: object) -> float:
        return self.seconds.pop(0)


@pytest.mark.parametrize(
    ("collective_s", "computing_s", "both_s", "expected"),
    [
        (1.0, 1.0, 1.0, 0.0),  # wholly hidden
        (1.0, 1.0, 1.25, 0.25),
        (0.5, 2.0, 2.1, 0.2),  # of the collective's time
        (2.0, 0.5, 2.1, 0.2),  # of the computation's, the hidden one
        (1.0, 1.0, 2.5, 1.0),  # never more than all of it
        (1.0, 1.0, 0.9, 0.0),  # the clock's noise
    ],
)
def test_interference_is_the_part_of_the_hidden_time_that_shows(
    collective_s: float, computing_s: float, both_s: float, expected: float
) -> None:
    watch = Watch(collective_s, 0.01, computing_s, both_s)
    job = SimpleNamespace(
        mesh=SimpleNamespace(device=torch.device("cpu")), watch=watch, everybody=None
    )
    group = SimpleNamespace(own=None)
    assert links._interference(job, group, lambda: None) == pytest.approx(expected)
    assert not watch.seconds
