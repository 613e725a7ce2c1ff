"""Stages whose times are known, in place of estimates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from merak.plan.cost.calibration import PassSeconds
from merak.plan.price.candidate import Candidate
from merak.plan.price.stages import slower
from merak.plan.price.step import price, priced_stages
from merak.plan.price.workload import Workload
from merak.zoo.workload import example_workload
from tests.unit.plan.price.test_step import LLAMA, adam, cluster

CANDIDATE = Candidate(pp=2, microbatch=4, num_microbatches=8)


@pytest.fixture(scope="module")
def llama() -> Workload:
    return example_workload(LLAMA, global_batch=32, sequence=16, optimizer=adam)


def test_a_stage_that_is_known_to_be_slower_makes_the_step_longer(llama: Workload) -> None:
    estimated = price(llama, cluster(), CANDIDATE)
    stages = dict(enumerate(priced_stages(llama, cluster(), CANDIDATE)))
    assert price(llama, cluster(), CANDIDATE, stages) == estimated
    added = PassSeconds(0.5, 0.5, 1.0, 1.0, 0.0)
    whole, compute = (slower(own, added) for own in (stages[1].whole, stages[1].compute))
    known = {1: replace(stages[1], whole=whole, compute=compute)}
    found = price(llama, cluster(), CANDIDATE, known)
    # The last stage is the bottleneck: it runs all eight microbatches one after another.
    assert found.step_s - estimated.step_s == pytest.approx(8 * 1.5, rel=0.05)
    assert found.peak_memory_bytes == estimated.peak_memory_bytes
