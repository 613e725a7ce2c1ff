"""Progressive layer dropping: its probabilities, and what plans make of it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from merak.core.errors import ArgumentsError, ScheduleError
from merak.graph.trace.branches.residual_blocks import add_buffers, find_stacks
from merak.plan.layer_dropping import kept, kept_at
from merak.plan.options import ParallelOptions
from merak.plan.price.candidate import Candidate
from merak.plan.price.step import memory_of, price
from merak.plan.price.workload import Workload
from merak.plan.search.pinned import Pinned
from merak.plan.search.search import search
from merak.zoo.workload import example_workload
from tests.unit.plan.launches import launched_in
from tests.unit.plan.price.test_step import LLAMA, adam, cluster


def test_all_blocks_are_kept_at_first_and_fewer_over_time() -> None:
    assert kept(0, 0.5, 0.01) == 1.0
    assert kept(100, 0.5, 0.01) == pytest.approx(0.5 * math.exp(-1) + 0.5)
    assert kept(10**6, 0.5, 0.01) == 0.5
    assert kept(100, 0.5, 0.0) == 1.0


def test_deeper_blocks_are_kept_less() -> None:
    assert [kept_at(i, 4, 0.5) for i in (1, 2, 3, 4)] == [0.875, 0.75, 0.625, 0.5]


@pytest.mark.parametrize("value", [0.0, -0.5, 1.5, math.nan])
def test_what_is_no_probability_is_refused(value: float) -> None:
    with pytest.raises(ArgumentsError, match="no probability to keep blocks; use a number above 0"):
        ParallelOptions(layer_keep=value)
    with pytest.raises(ArgumentsError, match=r"layer_keep_decay=-1.0 is no rate; use a number"):
        ParallelOptions(layer_keep_decay=-1.0)


def workload(drops: bool) -> Workload:
    made = example_workload(LLAMA, global_batch=32, sequence=16, optimizer=adam)
    if drops:
        source = made.source
        source.dropped = find_stacks(source.model)
        add_buffers(source.model, source.dropped, source.device)
    return made


@pytest.mark.parametrize(
    "candidate",
    [
        Candidate(dp=2, pp=2, tp=2, microbatch=2, num_microbatches=8, zero=1),
        Candidate(pp=2, microbatch=4, num_microbatches=8, schedule="zero_bubble_h1"),
        Candidate(pp=2, microbatch=4, num_microbatches=8, recompute="full"),
    ],
)
def test_memory_and_step_are_those_in_which_all_blocks_run(candidate: Candidate) -> None:
    """And of what scales the blocks: a division for each, some per cent of so small a model."""
    plain, dropped = workload(False), workload(True)
    devices = launched_in(cluster(), 0.0)  # where the host was waited for, kernels would count
    before, after = (price(own, devices, candidate) for own in (plain, dropped))
    assert before.step_s < after.step_s < 1.05 * before.step_s
    assert after.model_flops == before.model_flops
    memory = [memory_of(own, cluster(), candidate) for own in (plain, dropped)]
    for one, other in zip(*memory, strict=True):
        assert one.peak.total_bytes <= other.peak.total_bytes < 1.05 * one.peak.total_bytes


def test_a_plan_has_no_sharded_parameters() -> None:
    job = workload(True)
    assert job.drops_layers(1) and not workload(False).drops_layers(1)
    found = search(job, cluster(), Pinned(microbatch=1))
    assert {own.candidate.zero for own in found.plans} <= {0, 1, 2}
    rules = [own.why for own in found.rejected if own.what == "zero=3"]
    assert any("the model drops layers at random" in why for why in rules)
    candidate = Candidate(dp=8, microbatch=1, num_microbatches=4)
    assert price(job, cluster(), candidate).step_s > 0
    with pytest.raises(ScheduleError, match="use zero=2, or switch the dropping off: layer_keep=1"):
        price(job, cluster(), replace(candidate, zero=3))
    assert not search(job, cluster(), Pinned(zero=3, microbatch=1)).plans
