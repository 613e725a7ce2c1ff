"""schedule="auto" in a job is made for the job's own stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from merak.core import mesh
from merak.data import signature
from merak.engine import forecast_of
from merak.graph.segment.build import GraphSource
from merak.plan.activations.forecast import Forecast
from merak.plan.cost.measured_times import SegmentTimes, save_times
from merak.plan.engine_options import EngineOptions
from merak.schedule.costs import stage_costs
from merak.schedule.ir import Schedule
from merak.schedule.search.auto import auto
from merak.schedule.simulator.simulate import simulate
from tests.unit.engine.models import gpt2, text_batch

POSITIONS, MICROBATCHES = 3, 6


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    mesh.reset()
    yield
    mesh.reset()


def forecast(times: Path, **options: object) -> Forecast:
    sample = signature(text_batch()).columns
    planned = mesh.Mesh(1, 1, POSITIONS, 0, torch.device("cpu"), None)
    chosen = EngineOptions(schedule="auto", num_microbatches=MICROBATCHES, segment_times=times)
    source = GraphSource(gpt2(dropout=0.2))
    return forecast_of(source, sample, planned, replace(chosen, **options))  # type: ignore[arg-type]


@pytest.fixture
def times(tmp_path: Path) -> Path:
    """The first segment takes most of the forward, the last most of the backward."""
    graph = GraphSource(gpt2(dropout=0.2))
    from merak.graph.segment.build import build_graph

    found = build_graph(graph, dict(signature(text_batch()).columns), training=True).segments
    path = tmp_path / "times.json"
    last = len(found) - 1
    rows = [
        SegmentTimes(s.name, 9.0 if s.index == 0 else 1.0, 15.0 if s.index == last else 2.0)
        for s in found
    ]
    save_times(path, rows)
    return path


def makespan(found: Forecast, schedule: Schedule) -> float:
    """Of a schedule under the times that the job was given."""
    own = found.layout.partition.stages
    num = found.layout.partition.num_segments
    forward = tuple(sum(9.0 if i == 0 else 1.0 for i in stage) for stage in own)
    backward = tuple(sum(15.0 if i == num - 1 else 2.0 for i in stage) for stage in own)
    return simulate(schedule, stage_costs(forward, backward)).makespan


def test_it_is_shorter_than_one_for_equal_stages(times: Path) -> None:
    found = forecast(times)
    equal = auto(POSITIONS, MICROBATCHES, max_copies=1)
    assert makespan(found, found.layout.schedule) < makespan(found, equal)


def test_it_keeps_to_the_memory(times: Path) -> None:
    def peak(found: Forecast) -> int:
        ranks = found.ranks(found.layout.schedule)
        return max(rank.peak.total_bytes for rank in ranks)

    free = forecast(times)
    budget = int(0.9 * peak(free))
    narrow = forecast(times, memory_budget=budget)
    assert peak(narrow) <= budget
    # What fits is not undone by a longer step than need be: all that is not kept is recomputed.
    assert narrow.layout.schedule != free.layout.schedule
