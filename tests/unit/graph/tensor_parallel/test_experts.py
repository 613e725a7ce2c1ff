"""Experts and latent attention: partial sums are reduced once, where they are smallest.

Every parameter's gradient is compared with one process's, on all ranks in lockstep.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
import transformers as hf

from merak.graph.tensor_parallel.apply import tensor_parallel
from merak.graph.tensor_parallel.search.auto_shard import AutoSharder, SegmentTask
from merak.graph.tensor_parallel.search.cost import FORWARD, Transfer
from tests.unit.graph import tensor_parallel_cases as cases
from tests.unit.graph.lockstep import assert_parity

SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": cases.VOCABULARY, "max_position_embeddings": 16,
    "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "use_cache": False,
}  # fmt: skip

LATENT: dict[str, Any] = {
    "num_key_value_heads": 8, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1,
}  # fmt: skip

MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "mixtral": (hf.MixtralForCausalLM, hf.MixtralConfig, {"num_local_experts": 4}),
    "qwen3_moe": (
        hf.Qwen3MoeForCausalLM,
        hf.Qwen3MoeConfig,
        {"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2},
    ),
    "deepseek_v3": (hf.DeepseekV3ForCausalLM, hf.DeepseekV3Config, LATENT),
    "gpt_oss": (
        hf.GptOssForCausalLM,
        hf.GptOssConfig,
        {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4,
         "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "glm4_moe": (
        hf.Glm4MoeForCausalLM,
        hf.Glm4MoeConfig,
        {"head_dim": 8, "moe_intermediate_size": 16, "n_routed_experts": 4,
         "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_shared_experts": 1},
    ),
}  # fmt: skip


def build(name: str) -> torch.nn.Module:
    model_class, config_class, fields = MODELS[name]
    torch.manual_seed(0)
    config = config_class(**{**SMALL, **fields})
    model: torch.nn.Module = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.train()


def collectives(graph: Any, weights: Any, degree: int) -> list[Transfer]:
    sharder = AutoSharder(graph.parameters, degree)
    found: list[Transfer] = []
    for segment in graph.segments:
        own = {n: weights[n] for n in segment.parameters if n in weights}
        found += sharder(SegmentTask(segment, own, frozenset(segment.parameters))).transfers
    return found


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_those_of_one_process(
    name: str, degree: int, sequence: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_parity(
        build(name), cases.batch(padded=False), None, degree, monkeypatch, sequence=sequence
    )


@pytest.mark.parametrize("name", MODELS)
def test_an_expert_block_costs_what_a_dense_block_costs(name: str) -> None:
    graph = cases.traced(build(name), cases.batch(padded=False))
    weights = tensor_parallel(graph, None, 2).weights
    sizes = {n: math.prod(m.shape) for n, m in graph.parameters.items() if ".layers." in n}
    assert sum(size for n, size in sizes.items() if n in weights) >= 0.8 * sum(sizes.values())
    assert any("experts" in n for n in weights)
    hidden = cases.BATCH * cases.SEQUENCE * SMALL["hidden_size"]
    blocks = [t for t in collectives(graph, weights, 2) if not t.of_weights and t.numel >= hidden]
    assert all(transfer.numel == hidden for transfer in blocks)
    counts = Counter(transfer.kind in FORWARD for transfer in blocks)
    assert counts[True] <= 4 + 1 and counts[False] <= 4 + 1  # with the vocabulary's
