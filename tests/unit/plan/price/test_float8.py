"""The price of products in float8: devices that have them are faster, the others are refused."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from merak.core.errors import PlanError
from merak.plan.cluster.parse import parse_cluster
from merak.plan.options import ParallelOptions
from merak.plan.price.candidate import Candidate
from merak.plan.price.step import memory_of, price
from merak.plan.price.workload import Workload
from merak.zoo.model_source import ModelSource
from merak.zoo.workload import example_workload

CONFIG = LlamaConfig(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=2, num_attention_heads=32,
    num_key_value_heads=8, vocab_size=32000, max_position_embeddings=16384, use_cache=False,
)  # fmt: skip


def workload(fp8: bool, sequence: int) -> Workload:
    source = ModelSource(LlamaForCausalLM, CONFIG, None)
    found = example_workload(source, global_batch=4, sequence=sequence, dtype=torch.bfloat16)
    found.common = ParallelOptions(fp8=fp8)
    return found


def test_large_products_are_faster_and_hold_less() -> None:
    own, cluster = Candidate(pp=2, num_microbatches=4), parse_cluster("h100:2")
    usual, eight = workload(False, 16384), workload(True, 16384)
    assert 0.5 < price(eight, cluster, own).compute_s / price(usual, cluster, own).compute_s < 0.95
    # What layers read is saved in eight bits, and once for those that read the same.
    saved = [memory_of(w, cluster, own)[0].peak.total_bytes for w in (usual, eight)]
    assert saved[1] < saved[0]


def test_sizes_that_do_not_divide_change_nothing() -> None:
    own, cluster = Candidate(num_microbatches=4), parse_cluster("h100:1")
    usual, eight = (price(workload(fp8, 1000 + 1), cluster, own).step_s for fp8 in (False, True))
    assert eight == usual


def test_a_device_without_such_products_is_refused() -> None:
    with pytest.raises(PlanError, match=r"fp8=True multiplies in float8, which a100-80gb does not"):
        price(workload(True, 64), parse_cluster("a100:1"), Candidate(num_microbatches=4))
