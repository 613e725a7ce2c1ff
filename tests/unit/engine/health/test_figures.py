"""Figures of a job from those of its ranks."""

from __future__ import annotations

import pytest
import torch

from merak.core.mesh import Mesh
from merak.engine.health.figures import Interval, OwnFigures, job_figures
from merak.engine.recording.recorder import is_due

INTERVAL = Interval(seconds=2.0, steps=4, microbatches=32, tokens=8000)


def mesh_of(dp: int, pp: int) -> Mesh:
    return Mesh(dp, 1, pp, 0, torch.device("cpu"), None)


def test_throughput_and_utilisation() -> None:
    everyone = [OwnFigures(3 * 10**9)]
    found = job_figures(INTERVAL, everyone, mesh_of(1, 1), "memory_gb", 0.025)
    assert found.values == {
        "tokens_per_second": 4000.0, "step_seconds": 0.5, "mfu": 0.4, "memory_gb": 3.0
    }  # fmt: skip
    assert (found.memory_bytes, found.busy) == ((3 * 10**9,), ())


def test_what_is_not_known_is_not_logged() -> None:
    nothing = Interval(seconds=2.0, steps=4, microbatches=32, tokens=0)
    found = job_figures(nothing, [OwnFigures(None)], mesh_of(1, 1), "memory_gb", None)
    assert found.values == {"step_seconds": 0.5} and found.memory_bytes == (None,)


def test_a_bubble_is_what_all_ranks_do_not_compute() -> None:
    # In the order pp rank, dp rank. The pipeline's time is that of the rank that ends last.
    everyone = [
        OwnFigures(10, (8.0,), (10.0,)), OwnFigures(30, (6.0,), (10.0,)),
        OwnFigures(20, (5.0,), (7.0,)), OwnFigures(None, (9.0,), (9.0,)),
    ]  # fmt: skip
    found = job_figures(INTERVAL, everyone, mesh_of(2, 2), "peak_memory_gb", None)
    assert found.busy == pytest.approx((0.7, 0.7))
    assert found.values["bubble"] == pytest.approx(0.3)
    assert found.memory_bytes == (30, 20)
    assert {"peak_memory_gb", "peak_memory_gb_pp0", "peak_memory_gb_pp1"} <= found.values.keys()


def test_ranks_with_unequal_numbers_of_steps_compare_their_last() -> None:
    everyone = [OwnFigures(1, (1.0, 8.0), (2.0, 10.0)), OwnFigures(1, (4.0,), (8.0,))]
    assert job_figures(INTERVAL, everyone, mesh_of(1, 2), "m", None).busy == (0.8, 0.4)


def test_before_a_step_was_recorded_there_is_no_bubble() -> None:
    found = job_figures(INTERVAL, [OwnFigures(1), OwnFigures(1)], mesh_of(1, 2), "m", None)
    assert found.busy == () and "bubble" not in found.values


def test_steps_are_gathered_more_and_more_seldom() -> None:
    assert [number for number in range(1, 100) if is_due(number)] == [2, 4, 8, 16, 32, 64]
