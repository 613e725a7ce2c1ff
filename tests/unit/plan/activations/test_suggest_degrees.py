"""Degrees that are suggested to a job that does not fit: none that the engine would refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest

from merak.graph.trace.branches.residual_blocks import add_buffers, find_stacks
from merak.plan.activations.suggest_degrees import find_fitting_degrees
from merak.plan.partition import Partition
from merak.plan.price.candidate import Candidate
from merak.zoo.workload import example_workload
from tests.unit.plan.price.test_step import LLAMA, adam

ENOUGH = 10**12


@pytest.mark.parametrize(
    ("changes", "zero", "suggested"),
    [
        ({}, 0, ["tp=2", "zero=1"]),
        ({}, 2, ["tp=2", "zero=3"]),
        ({"gradient_compression": "bf16"}, 0, ["tp=2"]),
        ({"local_steps": 20}, 0, ["tp=2"]),
        ({"layer_keep": 0.5}, 0, ["tp=2", "zero=1"]),
        ({"layer_keep": 0.5}, 2, ["tp=2"]),
    ],
)
def test_a_zero_stage_that_is_refused_is_not_suggested(
    changes: dict[str, object], zero: int, suggested: list[str]
) -> None:
    job = example_workload(LLAMA, global_batch=8, sequence=8, optimizer=adam)
    for name, value in changes.items():
        if name == "layer_keep":
            job.source.dropped = find_stacks(job.model)
            add_buffers(job.model, job.source.dropped, job.source.device)
        else:
            job.common = replace(job.common, **{name: value})
    candidate = Candidate(dp=2, microbatch=1, num_microbatches=4, zero=zero)
    forecast = job.forecast(candidate, Partition(len(job.graph(1).segments), ()))
    assert find_fitting_degrees(forecast, ENOUGH) == suggested
