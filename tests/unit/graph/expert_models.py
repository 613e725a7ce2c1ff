"""Tiny mixtures of experts, with latent attention and with biases."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf

from tests.unit.graph import tensor_parallel_cases as cases

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
    "jetmoe": (
        hf.JetMoeForCausalLM,
        hf.JetMoeConfig,
        {"kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
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
