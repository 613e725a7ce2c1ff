"""What is said beside a plan: choices that no search makes, and that make it slow."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from merak.plan.cluster.parse import parse_cluster
from merak.plan.options import ParallelOptions
from merak.plan.price.advice import slow_choices
from merak.plan.price.candidate import Candidate
from merak.plan.price.step import price
from merak.zoo.model_source import ModelSource
from merak.zoo.workload import example_workload

SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


def test_tied_weights_on_a_slow_network_are_said_unless_they_are_exchanged_once() -> None:
    config = LlamaConfig(**SIZES, vocab_size=2**20, tie_word_embeddings=True)
    found = example_workload(
        ModelSource(LlamaForCausalLM, config, None), global_batch=16, sequence=32
    )
    cluster, plan = parse_cluster("rtx4090:1x2"), Candidate(pp=2, num_microbatches=16)
    often = price(found, cluster, plan)
    (said,) = slow_choices(often, found)
    assert "tied_gradients='step'" in said
    found.common = ParallelOptions(tied_gradients="step")
    once = price(found, cluster, plan)
    assert once.tied_s < often.tied_s / 4 and once.step_s < often.step_s
    assert not list(slow_choices(once, found))
    alone = price(found, parse_cluster("rtx4090:1x1"), Candidate(num_microbatches=16))
    assert alone.tied_s == 0.0


def test_products_that_autocast_leaves_in_float32_are_said() -> None:
    config = MixtralConfig(**SIZES, num_local_experts=4, vocab_size=128)
    source = ModelSource(MixtralForCausalLM, config, None)
    cluster, plan = parse_cluster("h100:1x1"), Candidate(num_microbatches=4)
    casts = example_workload(source, global_batch=4, sequence=32, autocast=torch.bfloat16)
    (said,) = slow_choices(price(casts, cluster, plan), casts)
    assert "autocast does not cast grouped_mm" in said
    assert "(master_weights) they are in bfloat16" in said
    low = example_workload(source, global_batch=4, sequence=32, dtype=torch.bfloat16)
    assert not list(slow_choices(price(low, cluster, plan), low))
