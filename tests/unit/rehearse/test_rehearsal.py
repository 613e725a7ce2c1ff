"""One rank of a plan, run alone: it takes the memory that the forecast says."""

from __future__ import annotations

import pytest
import torch

from merak.core.errors import MeshError, PlanError
from merak.rehearse.rehearsal import same_device
from tests.tiers import slow


def charged(found, axis, kind):
    return next((c for c in found.charges if (c.axis, c.kind) == (axis, kind)), None)


@pytest.mark.parametrize(
    ("rank", "name", "changes"),
    [
        (0, "GPT2LMHeadModel", {}),
        (19, "LlamaForCausalLM", {"zero": 3}),
        slow(31, "GPT2LMHeadModel", {}),
        slow(0, "LlamaForCausalLM", {}),
        slow(31, "LlamaForCausalLM", {}),
        slow(9, "LlamaForCausalLM", {"zero": 1}),
        slow(9, "LlamaForCausalLM", {"zero": 2}),
        slow(0, "GPT2LMHeadModel", {"zero": 3}),
        slow(19, "LlamaForCausalLM", {"sequence_parallel": True}),
        slow(19, "LlamaForCausalLM", {"recompute": "full"}),
        slow(19, "LlamaForCausalLM", {"recompute": "selective"}),
        slow(9, "LlamaForCausalLM", {"offload_activations": "full"}),
        slow(3, "LlamaForCausalLM", {"schedule": "interleaved_1f1b", "pp": 2, "dp": 8}),
        slow(9, "LlamaForCausalLM", {"schedule": "zero_bubble_h1"}),
        slow(9, "LlamaForCausalLM", {"schedule": "zero_bubble_v", "pp": 2, "dp": 8}),
        slow(9, "LlamaForCausalLM", {"schedule": "chimera"}),
        slow(9, "LlamaForCausalLM", {"schedule": "pipedream_2bw"}),
        slow(9, "LlamaForCausalLM", {"autocast": torch.bfloat16}),
        slow(9, "LlamaForCausalLM", {"dp": 8, "tp": 1}),
        slow(0, "LlamaForCausalLM", {"dp": 1, "tp": 1, "pp": 1}),
    ],
)  # fmt: skip
def test_a_rank_takes_the_memory_of_its_forecast(rehearsed, rank, name, changes):
    found = rehearsed(rank, name, **changes)
    # The rest is what kernels take inside, and what autograd holds of a split backward.
    assert found.peak_bytes == pytest.approx(found.memory.peak.total_bytes, rel=0.1)
    assert found.mesh.rank == rank and sum(found.candidate.partition) == 10
    for action in found.actions:
        assert action.measured_s > 0 and action.forecast_s > 0
        assert (action.charged_s > 0) == (found.mesh.tp > 1 and action.kind != "W")
    assert found.step_s > 0 and found.own_s > 0 and found.optimizer_s > 0


def test_what_a_middle_rank_sends_is_charged(rehearsed):
    found = rehearsed(19)  # pp rank 2, dp rank 1, tp rank 1
    assert (found.mesh.pp_rank, found.mesh.dp_rank, found.mesh.tp_rank) == (2, 1, 1)
    assert [(a.kind, a.stage, a.count) for a in found.actions] == [("F", 2, 8), ("B", 2, 8)]
    sent, received = charged(found, "pp", "send"), charged(found, "pp", "receive")
    # The hidden states of every microbatch on, and their gradients back; the sizes of a stage's
    # inputs and outputs are equal.
    assert sent.num_bytes == received.num_bytes >= 2 * 8 * (2 * 16 * 32 * 4)
    reduced = charged(found, "dp", "all_reduce")
    parameters = sum(stage.parameters for stage in found.memory.stages)
    assert reduced.num_bytes == pytest.approx(parameters, abs=64)
    assert reduced.ranks == 4 and reduced.seconds > 0
    shared = charged(found, "tp", "all_reduce")
    assert shared.ranks == 2 and shared.calls >= 8 * 2
    assert any("not on the cluster's h100-sxm" in warning for warning in found.warnings)


def test_a_rank_that_is_not_there(rehearsed):
    with pytest.raises(MeshError, match=r"rank 32 is none of the 32 ranks .* use 0 to 31"):
        rehearsed(32)


def test_a_cluster_that_is_too_small(rehearsed):
    with pytest.raises(PlanError, match=r"are 64 ranks, but the cluster has 32"):
        rehearsed(0, dp=8)


@pytest.mark.parametrize(
    ("here", "planned", "same"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm", True),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb", True),
        ("NVIDIA H200", "h100-sxm", False),
        ("NVIDIA GeForce RTX 4090", "rtx-4090", True),
        ("NVIDIA GeForce RTX 3090", "rtx-4090", False),
        ("the CPU", "h100-sxm", False),
    ],
)
def test_a_device_is_known_by_its_name(here, planned, same):
    assert same_device(here, planned) is same
