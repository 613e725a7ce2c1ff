"""`merak profile` with two ranks: a tiny model end to end. Structure and signs, never speeds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from merak.cli.main import main
from merak.plan.cluster.from_profile import cluster_of
from merak.plan.price.candidate import Candidate
from merak.plan.price.step import price
from merak.plan.profile.profile_file import load_profile
from merak.zoo.model_source import resolve_model
from merak.zoo.workload import example_workload

pytestmark = pytest.mark.slow

TINY = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 64}
TINY |= {"num_key_value_heads": 2, "intermediate_size": 64}


def test_a_tiny_model_is_profiled_and_priced(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    options = ["--device", "cpu", "--dp", "2", "--seq", "8", "--microbatch", "1,2"]
    named = ["--model", "LlamaForCausalLM", "--config", json.dumps(TINY), "--output", str(file)]
    assert main(["profile", *named, *options, "--json"]) == 0
    profile = load_profile(file)
    assert (profile.num_ranks, profile.machine.backend) == (2, "gloo")
    assert profile.machine.torch == torch.__version__
    assert {own.kind for own in profile.links} == {"host"}
    kinds = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"}
    assert {own.kind for own in profile.collectives} == kinds
    assert dict(profile.interference).keys() == {"host"}
    assert {row.microbatch for row in profile.segments} == {1, 2}
    assert all(row.seconds.forward_s > 0 for row in profile.segments)

    workload = example_workload(resolve_model("LlamaForCausalLM", TINY), global_batch=4, sequence=8)
    cluster = cluster_of(profile)
    assert cluster.num_devices == 2
    known = cluster.nodes[0].device.calibration
    assert known is not None
    # The planner finds the segments that were measured.
    found = price(workload, cluster, Candidate(dp=2, microbatch=2, num_microbatches=1))
    rows = [row for row in profile.segments if row.microbatch == 2]
    assert found.step_s > max(row.seconds.forward_s for row in rows)

    merged = tmp_path / "merged.json"
    assert main(["profile", "--merge", str(file), str(file), "--output", str(merged)]) == 0
    assert load_profile(merged) == profile
