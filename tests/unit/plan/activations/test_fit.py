"""Activations that do not fit: recomputed or in host memory, as the simulated iteration says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from merak.core import mesh
from merak.core.errors import PlanError
from merak.core.mesh import Mesh
from merak.core.tensor_meta import TensorMeta
from merak.data import signature
from merak.engine import forecast_of
from merak.graph.segment.build import GraphSource
from merak.plan.activations.fit import simulated
from merak.plan.activations.forecast import Forecast
from merak.plan.cluster.cluster import Cluster, Link, Nodes
from merak.plan.cluster.groups import groups_of
from merak.plan.cost.device import preset
from merak.plan.cost.kernels.segment_kernels import KernelChoice
from merak.plan.cost.measured_times import SegmentTimes
from merak.plan.engine_options import EngineOptions
from merak.plan.expected.times import expected_times
from merak.plan.price.segments import price_graph
from tests.tiers import slow
from tests.unit.engine.models import gpt2, text_batch

FAST, SLOW = 1e15, 1.0
LINK = Link("here", 0.0, 1e9)


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("merak.plan.layout.measure", lambda *_: preset("a100-80gb"))
    mesh.reset()
    yield
    mesh.reset()


@pytest.fixture
def equal_times(monkeypatch: pytest.MonkeyPatch) -> None:
    def times(graph: Any, *_: Any) -> list[SegmentTimes]:
        return [SegmentTimes(s.name, 1.0, 2.0) for s in graph.segments]

    for module in ("engine.build", "plan.layout"):
        monkeypatch.setattr(f"merak.{module}.segment_times", times)


def forecast(pp: int = 2, **options: Any) -> Forecast:
    place = Mesh(1, 1, pp, 0, torch.device("cpu"), None)
    chosen = EngineOptions(**{"num_microbatches": 4, "schedule": "gpipe", **options})
    sample = signature(text_batch(16)).columns
    return forecast_of(GraphSource(gpt2(dropout=0.1)), sample, place, chosen)


def peaks(found: Forecast) -> list[int]:
    return [r.peak.total_bytes for r in found.ranks(found.layout.schedule)]


def between(share: float = 0.5) -> int:
    """A budget between what everything kept takes and what everything recomputed takes."""
    most, least = (max(peaks(forecast(recompute=choice))) for choice in ("off", "full"))
    return int(least + share * (most - least))


def seconds(found: Forecast, rate: float) -> float:
    layout = found.layout
    segments = layout.partition.num_segments
    times = found.timed([SegmentTimes("", 1.0, 2.0) for _ in range(segments)], None)
    return simulated(found, found.policy, times, rate).iteration_s


def test_a_recomputation_takes_as_long_in_an_expectation_as_in_a_price() -> None:
    """Both leave out the same operators, such as a segment's last product."""
    device = replace(preset("a100-80gb"), device_type="cpu", efficiency=None)
    found = forecast(recompute="full", device_profile=device)
    segments = found.local_model.segments
    groups = groups_of(Cluster((Nodes(device, 1, 1, LINK, LINK),)), 1, 1)
    prices = [price_graph(own.graph, KernelChoice(), device, groups) for own in segments]
    times = found.timed(prices, device)
    kept = found.memory.find_selective_ops(device)
    trained = [own.index for own in segments if own.index not in found.untrained]
    assert kept
    for ops in ({}, kept):
        expected = [found.recompute_s(times, i, ops.get(i)) for i in trained]
        assert expected == pytest.approx(
            [found.recompute_s(prices, i, ops.get(i)) for i in trained]
        )
        assert sum(expected) < sum(prices[i].forward_s for i in trained)
    said = expected_times(found, device)
    assert said is not None and sum(said.recompute_s) == pytest.approx(
        sum(found.recompute_s(times, i) for i in trained)
    )


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble_v", "chimera"])
def test_a_fast_way_to_the_host_leaves_nothing_to_recompute(schedule: str) -> None:
    most = max(peaks(forecast(schedule=schedule, recompute="off")))
    away = max(peaks(forecast(schedule=schedule, recompute="off", offload_activations="full")))
    budget = (most + away) // 2
    found = forecast(
        schedule=schedule,
        recompute="auto",
        offload_activations="auto",
        memory_budget=budget,
        host_bytes_per_s=FAST,
    )
    assert max(peaks(found)) <= budget
    assert found.layout.activations.offloaded
    assert found.saved == frozenset(range(found.layout.partition.num_segments))


def test_a_slow_way_to_the_host_leaves_it_alone() -> None:
    budget = between()
    asked = {"recompute": "auto", "memory_budget": budget}
    found = forecast(offload_activations="auto", host_bytes_per_s=SLOW, **asked)
    assert max(peaks(found)) <= budget
    assert not found.layout.activations.offloaded
    assert len(found.saved) >= len(forecast(**asked).saved)


@pytest.mark.usefixtures("equal_times")
def test_in_between_the_iteration_is_shorter_than_with_either_alone() -> None:
    sizes = sorted(size for size in forecast().offload_bytes().values() if size)
    rate = sizes[len(sizes) // 2] / 1.0  # half of them leave while another one's forward runs
    budget = between(0.1)

    def fitted(**options: Any) -> Forecast:
        found = forecast(memory_budget=budget, host_bytes_per_s=rate, **options)
        assert max(peaks(found)) <= budget
        return found

    again = fitted(recompute="auto")
    both = fitted(recompute="auto", offload_activations="auto")
    assert seconds(both, rate) < seconds(again, rate)


def test_only_as_much_is_away_as_has_to_be() -> None:
    most = max(peaks(forecast(recompute="off")))
    asked = {"recompute": "off", "offload_activations": "auto", "host_bytes_per_s": FAST}
    assert not forecast(memory_budget=most, **asked).layout.activations.offloaded
    found = forecast(memory_budget=most - 1, **asked)
    some = found.layout.activations.offloaded
    assert 1 <= len(some) < len(found.offload_bytes())
    assert found.saved == frozenset(range(found.layout.partition.num_segments))


def test_a_list_of_what_recomputes_is_kept_to() -> None:
    budget = between()
    found = forecast(recompute="1,2", offload_activations="auto", memory_budget=budget)
    assert {1, 2}.isdisjoint(found.saved) and max(peaks(found)) <= budget
    assert len(found.saved) == found.layout.partition.num_segments - 2


@pytest.mark.parametrize("recompute", ["auto", "off"])
def test_what_fits_nowhere_is_refused(recompute: str) -> None:
    with pytest.raises(PlanError, match=r"pp rank \d needs .* but may hold 1.00 kB"):
        forecast(recompute=recompute, offload_activations="auto", memory_budget=1000)


def test_a_misfit_names_offloading_where_that_fits() -> None:
    many = {"recompute": "off", "num_microbatches": 32}  # whose inputs alone are more than one's
    away = max(peaks(forecast(**many, offload_activations="full")))
    least = max(peaks(forecast(**{**many, "recompute": "full"})))
    assert away < least
    only = r"; offload_activations='full' needs .* with .* of host memory, so use that or 'auto'\.$"
    with pytest.raises(PlanError, match=only):
        forecast(**many, memory_budget=(away + least) // 2)
    both = r"recompute='full' needs .* and offload_activations='full' needs .*, so use one of them"
    with pytest.raises(PlanError, match=both):
        forecast(**many, memory_budget=least)


@pytest.mark.parametrize("recompute", ["off", slow("full")])
def test_a_large_head_is_in_chunks_unless_all_logits_are_wanted(recompute: str) -> None:
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=2**20)
    with torch.device("meta"):
        source = GraphSource(transformers.GPT2LMHeadModel(config))
    ids = TensorMeta((2, 256), torch.int64)  # 2 GiB of logits
    columns = {"input_ids": ids, "labels": ids}

    def found(**options: Any) -> Forecast:
        chosen = EngineOptions(num_microbatches=1, recompute=recompute, **options)
        place = Mesh(1, 1, 1, 0, torch.device("cpu"), None)
        return forecast_of(source, tuple(columns.items()), place, chosen)

    whole, chunked = max(peaks(found(loss_chunk_bytes=0))), max(peaks(found()))
    assert chunked + 2 * 2**30 < whole


def test_it_needs_to_know_the_memory() -> None:
    with pytest.raises(PlanError, match="offload_activations='auto' fills a memory whose size"):
        forecast(offload_activations="auto")


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_nothing_kept_is_refused(recompute: str) -> None:
    with pytest.raises(PlanError, match="'auto' offloads saved activations, but every seg"):
        forecast(recompute=recompute, offload_activations="auto", memory_budget=10**9)
