"""Versions of weights: kept while they are needed, and no longer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from merak.engine.weight_versions import StashedWeights
from merak.schedule.ir import FINAL_KINDS, Kind
from merak.schedule.registry import build


def run_stage(schedule_name: str, stage: int, num_ranks: int, num_microbatches: int) -> int:
    """Follow one stage's actions with a parameter that counts its updates; versions at most."""
    schedule = build(schedule_name, num_ranks, num_microbatches)
    parameter = nn.Parameter(torch.zeros(3))
    weights = StashedWeights({"w": parameter})
    weights.start_step(schedule.weight_versions[stage])
    most, done = 0, 0
    outputs = {}
    for action in schedule.actions[stage]:
        m = action.microbatch
        leaf = weights.for_microbatch(m)["w"]
        assert leaf.tolist() == [schedule.weight_version(stage, m)] * 3
        most = max(most, len(weights._leaves))
        if action.kind is Kind.FORWARD:
            outputs[m] = (leaf * leaf).sum()  # saves the weights for the backward
        if action.kind in FINAL_KINDS:
            outputs.pop(m).backward()
            weights.release(m)
            done += 1
            if done % schedule.microbatches_per_update == 0:
                first = m + 1 - schedule.microbatches_per_update
                used = [schedule.weight_version(stage, i) for i in range(first, m + 1)]
                assert parameter.grad is not None
                assert parameter.grad.tolist() == [2.0 * sum(used)] * 3
                weights.before_update()
                with torch.no_grad():
                    parameter += 1.0
                parameter.grad = None
    assert parameter.tolist() == [schedule.num_updates] * 3
    return most


@pytest.mark.parametrize("stage", range(4))
def test_pipedream_keeps_a_version_per_stage_to_come(stage: int) -> None:
    assert run_stage("pipedream", stage, 4, 12) == 4 - stage


@pytest.mark.parametrize("stage", range(4))
def test_2bw_keeps_two_versions(stage: int) -> None:
    assert run_stage("pipedream_2bw", stage, 4, 12) == 2


def test_a_version_that_nobody_needs_is_updated_in_place() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    weights = StashedWeights({"w": parameter})
    weights.start_step((0, 1))
    before = parameter.data_ptr()
    weights.release(0)
    weights.before_update()
    assert parameter.data_ptr() == before
    weights.start_step((0, 0))
    weights.release(0)
    weights.before_update()  # microbatch 1 still needs the old version
    assert parameter.data_ptr() != before


def test_a_frozen_parameter_gets_no_gradient() -> None:
    weights = StashedWeights({"w": nn.Parameter(torch.zeros(3), requires_grad=False)})
    weights.start_step((0,))
    assert not weights.for_microbatch(0)["w"].requires_grad
