"""Tiny mixtures of experts, with latent attention and with biases."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers as hf
from torch import nn

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
    "llama4": (
        hf.Llama4ForCausalLM,
        hf.Llama4TextConfig,
        {"intermediate_size_mlp": 64, "num_local_experts": 4, "num_experts_per_tok": 1,
         "head_dim": 4, "layer_types": ["full_attention"] * 2},
    ),
    "flex_olmo": (
        hf.FlexOlmoForCausalLM,
        hf.FlexOlmoConfig,
        {"num_experts": 4, "num_experts_per_tok": 2},
    ),
    "ernie4_5_moe": (
        hf.Ernie4_5_MoeForCausalLM,
        hf.Ernie4_5_MoeConfig,
        {"moe_intermediate_size": 16, "moe_num_experts": 4, "moe_k": 2,
         "moe_num_shared_experts": 1, "moe_layer_start_index": 1},
    ),
    "afmoe": (
        hf.AfmoeForCausalLM,
        hf.AfmoeConfig,
        {"head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2,
         "num_dense_layers": 1, "sliding_window": 4, "global_attn_every_n_layers": 2},
    ),
    "dbrx": (
        hf.DbrxForCausalLM,
        hf.DbrxConfig,
        {"d_model": 32, "n_heads": 4, "n_layers": 1, "max_seq_len": 16,
         "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2,
                        "hidden_size": 32},
         "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}},
    ),
    "exaone_moe": (
        hf.ExaoneMoeForCausalLM,
        hf.ExaoneMoeConfig,
        {"head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2,
         "first_k_dense_replace": 1, "mlp_layer_types": ["dense", "sparse"],
         "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}  # fmt: skip

# Experts in modules of their own, called by a loop over the choices.
LOOPED_MODULES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "switch": (
        hf.SwitchTransformersForConditionalGeneration,
        hf.SwitchTransformersConfig,
        {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "num_layers": 1,
         "num_decoder_layers": 1, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 0,
         "num_experts": 4, "decoder_start_token_id": 0},
    ),
}  # fmt: skip


def build(name: str, **changed: Any) -> torch.nn.Module:
    """A small model, with some fields of its configuration changed."""
    if name in PLAIN:
        torch.manual_seed(0)
        return PlainTokens(PLAIN[name]())
    model_class, config_class, fields = {**MODELS, **LOOPED_MODULES}[name]
    torch.manual_seed(0)
    config = config_class(**{**SMALL, **fields, **changed})
    model: torch.nn.Module = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.train()


class Dispatched(nn.Module):
    """GShard's experts: tokens are dispatched to, and combined from, places of fixed capacity."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(16, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, 16, 32) * 0.2)
        self.bias = nn.Parameter(torch.randn(experts, 1, 32) * 0.2)
        self.down = nn.Parameter(torch.randn(experts, 32, 16) * 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share = self.gate(x).softmax(-1)
        chosen = nn.functional.one_hot(share.argmax(-1), share.shape[-1])
        place = (chosen.cumsum(0) * chosen - chosen).sum(-1)
        dispatch = chosen.unsqueeze(-1) * nn.functional.one_hot(place, x.shape[0]).unsqueeze(1)
        combine = dispatch.to(x.dtype) * share.unsqueeze(-1)
        rows = torch.einsum("tec,th->ech", dispatch.to(x.dtype), x)
        rows = (torch.einsum("ech,ehi->eci", rows, self.up) + self.bias).relu()
        return x + torch.einsum(
            "tec,ech->th", combine, torch.einsum("eci,eih->ech", rows, self.down)
        )


class Looped(nn.Module):
    """Experts that a loop visits, each that some token has chosen, and one that does nothing."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(16, experts + 1, bias=False)
        self.experts = LoopedExperts(experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
        return x + self.experts(x, chosen, weights)


class LoopedExperts(nn.Module):
    """The loop of `Looped`."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, 32, 16) * 0.2)
        self.down = nn.Parameter(torch.randn(experts, 16, 32) * 0.2)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        mask = nn.functional.one_hot(chosen, len(self.up) + 1).permute(2, 1, 0)
        for expert in mask.sum((-1, -2)).nonzero():
            place, token = torch.where(mask[expert[0]])
            rows = x[token]
            if expert < len(self.up):
                inner = nn.functional.silu(nn.functional.linear(rows, self.up[expert[0]]))
                rows = nn.functional.linear(inner, self.down[expert[0]])
            out.index_add_(0, token, rows * weights[token, place, None])
        return out


class Separate(nn.Module):
    """Experts that are modules; one that no token chooses is not called, or called for none."""

    def __init__(self, experts: int = 4, skips_idle: bool = True) -> None:
        super().__init__()
        self.skips_idle = skips_idle
        self.gate = nn.Linear(16, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16, bias=False))
            for _ in range(experts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            if len(token) or not self.skips_idle:
                out.index_add_(0, token, expert(x[token]) * weights[token, place, None])
        return x + out


class GatedExpert(nn.Module):
    """An expert of three products, each with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(16, 32), nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = self.down(nn.functional.silu(self.gate(rows)) * self.up(rows))
        return inner


class Gated(Separate):
    """Such experts with a gate, and a bias for each product."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__(experts)
        self.experts = nn.ModuleList(GatedExpert() for _ in range(experts))


class AddAuxiliaryLoss(torch.autograd.Function):
    """Passes its input on, and gives the loss a gradient of one, as in DeepSeek-MoE's own code."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.dtype, ctx.required = loss.dtype, loss.requires_grad
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        own = torch.ones(1, dtype=ctx.dtype, device=gradient.device) if ctx.required else None
        return gradient, own


class Sorted(Separate):
    """Such experts on ranges of rows that are sorted by expert, with a loss for their balance."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x).softmax(-1)
        weights, chosen = scores.topk(2, dim=-1)
        numbers = chosen.view(-1)
        order = numbers.argsort()
        ends = numbers.bincount(minlength=len(self.experts)).cpu().numpy().cumsum(0)
        rows, made, start = x[order // 2], [], 0
        for expert, end in zip(self.experts, ends, strict=True):
            if start < end or not self.skips_idle:
                made.append(expert(rows[start:end]))
            start = end
        results = torch.empty_like(rows)
        results[order] = torch.cat(made)
        out = (results.view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(1)
        often = nn.functional.one_hot(numbers, len(self.experts)).to(x.dtype).mean(0)
        added: torch.Tensor = AddAuxiliaryLoss.apply(out, (scores.mean(0) * often).sum() * 0.1)
        return x + added


class Stacked(nn.Module):
    """A router, and the weights of experts in two stacks."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(16, experts)
        self.up = nn.Parameter(torch.randn(experts, 16, 32) * 0.2)
        self.down = nn.Parameter(torch.randn(experts, 32, 16) * 0.2)


class GroupedProducts(Stacked):
    """Experts by grouped products of torch, in float32 unless the weights are converted."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
        numbers = chosen.flatten()
        order = numbers.argsort(stable=True)
        often = nn.functional.one_hot(numbers, len(self.up)).sum(0)
        ends = often.cumsum(0).to(torch.int32)
        rows = nn.functional.grouped_mm(x[order // 2], self.up, offs=ends).relu()
        rows = nn.functional.grouped_mm(rows, self.down, offs=ends)
        return x.index_add(0, order // 2, rows * weights.flatten()[order, None])


PLAIN: dict[str, Any] = {
    "gshard": Dispatched,
    "looped": Looped,
    "separate": Separate,
    "all_called": partial(Separate, skips_idle=False),
    "sorted": Sorted,
    "gated": Gated,
    "grouped": GroupedProducts,
}
"""Layers of experts that are no model of transformers'."""


class PlainTokens(nn.Module):
    """A language model with one layer of experts."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(cases.VOCABULARY, 16)
        self.layers = nn.ModuleList([layer])
        self.head = nn.Linear(16, cases.VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.layers[0](self.embed(input_ids).flatten(0, 1)))
        return {"loss": nn.functional.cross_entropy(logits, labels.flatten())}
