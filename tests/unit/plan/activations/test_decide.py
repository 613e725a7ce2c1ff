"""What recomputes on a single rank: how often segments run, and what is refused."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch

import merak
from merak.core import mesh
from merak.core.errors import PlanError
from merak.data import signature
from merak.engine import Engine, build_engine, forecast_of
from merak.graph.joint.generate import run as run_part
from merak.graph.segment.build import GraphSource
from merak.plan.activations.forecast import Forecast
from merak.plan.cost.device import preset
from merak.plan.engine_options import EngineOptions
from merak.schedule.registry import build
from tests.tiers import one_in
from tests.unit.engine.models import gpt2, text_batch


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Measuring the machine takes a second, and here any speeds will do.
    monkeypatch.setattr("merak.plan.layout.measure", lambda *_: preset("a100-80gb"))
    mesh.reset()
    merak.init(device="cpu")
    yield
    mesh.reset()


def adam(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)  # type: ignore[arg-type]


def engine_of(**options: object) -> Engine:
    sample = signature(text_batch()).columns
    chosen = EngineOptions(num_microbatches=2, **options)  # type: ignore[arg-type]
    return build_engine(GraphSource(gpt2(dropout=0.2)), sample, mesh.current_mesh(), chosen)


def forecast(**options: object) -> Forecast:
    sample = signature(text_batch()).columns
    chosen = EngineOptions(num_microbatches=2, optimizer=adam, **options)  # type: ignore[arg-type]
    return forecast_of(GraphSource(gpt2(dropout=0.2)), sample, mesh.current_mesh(), chosen)


def peak(found: Forecast, saved: frozenset[int] | None = None) -> int:
    schedule = found.layout.plans.base.schedule
    policy = found.policy if saved is None else replace(found.policy, saved=saved)
    (rank,) = found.ranks(schedule, policy)
    return rank.peak.total_bytes


class Counted:
    """A joint segment whose forwards are counted."""

    def __init__(self, joint, counting):  # type: ignore[no-untyped-def]
        self._joint, self._counting = joint, counting

    def parts(self, arguments, given=None):  # type: ignore[no-untyped-def]
        found = self._joint.parts(arguments, given)
        names = ("forward", "plain", "recompute")
        whole = {name: partial(run_part, getattr(found, name)) for name in names}
        return replace(found, **{name: (self._counting(part),) for name, part in whole.items()})


def count_runs(engine: Engine) -> Counter[int]:
    """Count the calls of every segment from now on."""
    runs: Counter[int] = Counter()
    program = engine._state.base
    for number, stage in program.stages.items():
        counted = []
        for segment in stage.segments:

            def counting(function, index=segment.segment.index):  # type: ignore[no-untyped-def]
                def call(*args):  # type: ignore[no-untyped-def]
                    runs[index] += 1
                    return function(*args)

                return call

            joint = None if segment.joint is None else Counted(segment.joint, counting)
            function = counting(segment.function)
            counted.append(replace(segment, function=function, joint=joint))
        program.stages[number] = replace(stage, segments=tuple(counted), runs=tuple(counted))
    return runs


@pytest.mark.parametrize("schedule", ["1f1b", "early_recompute", "zero_bubble_h1"])
@one_in(2)
@pytest.mark.parametrize(
    ("recompute", "twice"),
    [("off", set()), ("full", set(range(6))), ("1,4", {1, 4}), ([0, 5], {0, 5})],
)
def test_a_segment_that_keeps_its_activations_runs_once(
    schedule: str, recompute: object, twice: set[int]
) -> None:
    engine = engine_of(recompute=recompute, schedule=schedule)
    runs = count_runs(engine)
    batch = text_batch()
    engine.train_step(0, [signature(batch).columns] * 2, [batch] * 2, 0.5)
    assert runs == {i: 2 * (1 + (i in twice)) for i in range(6)}


def test_a_share_of_the_segments_recomputes() -> None:
    engine = engine_of(recompute=0.5)
    saved = [s.saved for s in engine._state.base.stages[0].segments]
    assert sum(saved) == 3


@one_in(2)
@pytest.mark.parametrize("recompute", ["full", "2,3", 0.5, "selective"])
def test_recomputation_changes_no_gradient(recompute: object) -> None:
    batch = text_batch()
    outcomes = []
    schedule = "zero_bubble_h1" if recompute == "selective" else "1f1b"
    for chosen in ("off", recompute):
        engine = engine_of(recompute=chosen, schedule=schedule)
        losses = engine.train_step(3, [signature(batch).columns] * 2, [batch] * 2, 0.5)
        outcomes.append((losses, {n: p.grad for n, p in engine.parameters.items()}))
    (losses, gradients), (other_losses, others) = outcomes
    assert torch.equal(losses, other_losses)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, others[name]), name


def test_gradients_hold_on_to_nothing() -> None:
    engine = engine_of(schedule="zero_bubble_h1")
    batch = text_batch()
    engine.train_step(0, [signature(batch).columns] * 2, [batch] * 2, 0.5)
    for name, parameter in engine.parameters.items():
        assert parameter.grad is not None and parameter.grad.grad_fn is None, name


def test_auto_fills_a_budget() -> None:
    least, most = peak(forecast(), frozenset()), peak(forecast(recompute="off"))
    assert least < most
    budget = (least + most) // 2
    found = forecast(recompute="auto", memory_budget=budget)
    assert 0 < len(found.layout.activations.saved) < 6
    assert peak(found) <= budget
    assert len(forecast(recompute="auto", memory_budget=most).layout.activations.saved) == 6


def test_a_memory_that_does_not_fit_is_refused_with_what_would() -> None:
    least, most = peak(forecast(), frozenset()), peak(forecast(recompute="off"))
    refused = (
        r"needs .* at B\d \(parameters .*optimizer .*activations.*"
        r"'full' needs .* and offload.*, so use one of them"
    )
    with pytest.raises(PlanError, match=refused):
        forecast(memory_budget=most - 1)
    with pytest.raises(PlanError, match=r"if everything recomputes; use pp=\d with recompute"):
        forecast(memory_budget=least - 1)
    with pytest.raises(PlanError, match=r"no pp up to 6 fits; use a larger tp"):
        forecast(memory_budget=1000, recompute="auto")
    assert forecast(memory_budget=most).saved == frozenset(range(6))


def test_a_partition_that_is_said_to_fit_does() -> None:
    batch = text_batch(size=4)
    layout = mesh.Mesh(1, 1, 2, 0, torch.device("cpu"), None)

    def planned(**options: object) -> Forecast:
        chosen = EngineOptions(num_microbatches=4, optimizer=adam, recompute="off")
        chosen = replace(chosen, **options)  # type: ignore[arg-type]
        return forecast_of(GraphSource(gpt2(layers=4)), signature(batch).columns, layout, chosen)

    found = planned()
    first, last = (own.peak.total_bytes for own in found.ranks(found.layout.schedule))
    assert last < first, "the first rank holds activations of more microbatches"
    with pytest.raises(
        PlanError, match=r"partition=\[4, 6\] needs .*, so use one of them or 'auto'"
    ):
        planned(memory_budget=int(0.97 * first))
    planned(memory_budget=int(0.97 * first), partition=[4, 6])
    with pytest.raises(PlanError, match=r"^(?!.*partition=)"):
        planned(memory_budget=int(0.9 * first))


def test_degrees_that_are_said_to_fit_do() -> None:
    sample = signature(text_batch()).columns

    def planned(dp: int = 2, tp: int = 1, pp: int = 1, **options: object) -> Forecast:
        layout = mesh.Mesh(dp, tp, pp, 0, torch.device("cpu"), None)
        chosen = EngineOptions(num_microbatches=2, optimizer=adam, recompute="full")
        chosen = replace(chosen, **options)  # type: ignore[arg-type]
        return forecast_of(GraphSource(gpt2(dropout=0.2)), sample, layout, chosen)

    budget = peak(planned()) - 1
    with pytest.raises(PlanError) as caught:
        planned(memory_budget=budget)
    found = re.search(
        r"use pp=(\d) with recompute='full', tp=(\d) or zero=(\d) with it, or a smaller",
        str(caught.value),
    )
    assert found is not None, caught.value
    pp, tp, zero = map(int, found.groups())
    for options in ({"pp": pp}, {"tp": tp}, {"zero": zero}):
        planned(**options, memory_budget=budget)  # type: ignore[arg-type]
    with pytest.raises(PlanError):
        planned(memory_budget=budget, zero=zero - 1)


def test_auto_without_a_budget_is_refused_on_the_cpu() -> None:
    with pytest.raises(PlanError, match="memory whose size is not known on the CPU; give"):
        forecast(recompute="auto")


def test_a_memory_that_cannot_be_foreseen_stops_nobody_who_did_not_ask(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(job: object) -> None:
        raise RuntimeError("no numbers here")

    monkeypatch.setattr("merak.plan.activations.forecast.MemoryModel", fail)
    with pytest.raises(PlanError, match=r"cannot be forecast \(RuntimeError: no numbers"):
        forecast(memory_budget=10**9)
    # As on a GPU, whose memory is known without asking.
    monkeypatch.setattr("merak.plan.activations.decide._budget", lambda *_: 10**9)
    assert forecast().saved == frozenset(range(6))
    assert "it is not compared with the device's" in caplog.text
    # What the error advises works there as well.
    assert forecast(recompute="off").saved == frozenset(range(6))
    assert forecast(recompute="full").saved == frozenset()
    assert forecast(recompute=[0, 1]).saved == frozenset(range(2, 6))
    with pytest.raises(PlanError, match="leave memory_budget unset, and recompute 'off'"):
        forecast(recompute="auto")


def test_unset_leaves_it_to_the_schedule() -> None:
    assert forecast().layout.plans.base.schedule == build("1f1b", 1, 2, recompute=False)
    early = forecast(schedule="early_recompute")
    assert early.layout.plans.base.schedule == build("early_recompute", 1, 2)
    assert early.saved == frozenset()
    off = forecast(schedule="early_recompute", recompute="off")
    assert off.layout.plans.base.schedule.recompute == (False,)
