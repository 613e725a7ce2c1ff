"""Two tiny layers of every architecture that tensor parallelism must split, and their batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import nn

VOCABULARY = 40

_IDS = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
_SIZES = {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 2}
_GROUPED = {**_SIZES, "intermediate_size": 96, "num_key_value_heads": 4}
_ENCODER = {
    **_SIZES, "intermediate_size": 96, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model class with a tiny config.

    Args:
        model: the class.
        config: its config class.
        settings: the config's fields.
        block: what the names of a block's parameters hold.
        columns: kind of batch: "text", "pairs" (encoder and decoder) or "image".
    """

    model: Callable[[Any], nn.Module]
    config: Callable[..., Any]
    settings: Mapping[str, Any]
    block: str
    columns: str = "text"

    def build(self, **changes: Any) -> nn.Module:
        """The model in train mode without dropout, the same weights every time."""
        torch.manual_seed(0)
        model = self.model(self.config(**{**self.settings, **changes}))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)  # biases and norms too
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model.train()

    def batch(self) -> dict[str, torch.Tensor]:
        """Two samples; a part of the first is padding."""
        generator = torch.Generator().manual_seed(1)
        if self.columns == "image":
            pixels = torch.randn(2, 3, 16, 16, generator=generator)
            return {"pixel_values": pixels, "labels": torch.tensor([1, 3])}
        ids = torch.randint(2, VOCABULARY, (2, 8), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, -2:] = 0
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}


def _causal(config: Any, model: Any, sizes: Mapping[str, Any], block: str, **own: Any) -> Any:
    return Architecture(model, config, {**_IDS, "use_cache": False, **sizes, **own}, block)


ARCHITECTURES: Mapping[str, Architecture] = {
    "gpt2": _causal(
        hf.GPT2Config, hf.GPT2LMHeadModel, {}, ".h.", n_layer=2, n_embd=64, n_head=8,
        n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ),
    "gpt_neox": _causal(
        hf.GPTNeoXConfig, hf.GPTNeoXForCausalLM, _SIZES, ".layers.", intermediate_size=96,
    ),
    "bloom": _causal(
        hf.BloomConfig, hf.BloomForCausalLM, {}, ".h.", hidden_size=64, n_layer=2, n_head=8,
        hidden_dropout=0.0, attention_dropout=0.0,
    ),
    "opt": _causal(
        hf.OPTConfig, hf.OPTForCausalLM, _SIZES, ".layers.", ffn_dim=96, dropout=0.0,
        word_embed_proj_dim=64, max_position_embeddings=16,
    ),
    "falcon": _causal(hf.FalconConfig, hf.FalconForCausalLM, _SIZES, ".h."),
    "falcon_new": _causal(
        hf.FalconConfig, hf.FalconForCausalLM, _SIZES, ".h.", new_decoder_architecture=True,
        num_kv_heads=4,
    ),
    "falcon_alibi": _causal(
        hf.FalconConfig, hf.FalconForCausalLM, _SIZES, ".h.", alibi=True, multi_query=False,
        parallel_attn=False, bias=True,
    ),
    "gpt_bigcode": _causal(
        hf.GPTBigCodeConfig, hf.GPTBigCodeForCausalLM, {}, ".h.", n_layer=2, n_embd=64, n_head=8,
        n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ),
    "llama": _causal(hf.LlamaConfig, hf.LlamaForCausalLM, _GROUPED, ".layers."),
    "mistral": _causal(hf.MistralConfig, hf.MistralForCausalLM, _GROUPED, ".layers."),
    "qwen3": _causal(hf.Qwen3Config, hf.Qwen3ForCausalLM, _GROUPED, ".layers.", head_dim=8),
    "gemma3": _causal(
        hf.Gemma3TextConfig, hf.Gemma3ForCausalLM, _GROUPED, ".layers.", head_dim=8,
        sliding_window=4, layer_types=["sliding_attention", "full_attention"],
    ),
    "phi3": _causal(hf.Phi3Config, hf.Phi3ForCausalLM, _GROUPED, ".layers."),
    "mixtral": _causal(
        hf.MixtralConfig, hf.MixtralForCausalLM, _GROUPED, ".layers.", num_local_experts=4,
    ),
    "bert": Architecture(
        hf.BertForMaskedLM, hf.BertConfig,
        {**_ENCODER, "vocab_size": VOCABULARY, "max_position_embeddings": 16}, ".layer.",
    ),
    "roberta": Architecture(
        hf.RobertaForMaskedLM, hf.RobertaConfig,
        {**_ENCODER, **_IDS, "max_position_embeddings": 16}, ".layer.",
    ),
    "deberta_v2": Architecture(
        hf.DebertaV2ForMaskedLM, hf.DebertaV2Config,
        {
            **_ENCODER, "vocab_size": VOCABULARY, "max_position_embeddings": 16,
            "relative_attention": True, "position_buckets": 4, "pos_att_type": ["p2c", "c2p"],
            "share_att_key": True, "norm_rel_ebd": "layer_norm", "pooler_hidden_size": 64,
        },
        ".layer.",
    ),
    "t5": Architecture(
        hf.T5ForConditionalGeneration, hf.T5Config,
        {
            "vocab_size": VOCABULARY, "d_model": 64, "d_ff": 96, "d_kv": 8, "num_layers": 2,
            "num_heads": 8, "dropout_rate": 0.0, "use_cache": False, "decoder_start_token_id": 0,
            "pad_token_id": 1,
        },
        ".block.",
    ),
    "bart": Architecture(
        hf.BartForConditionalGeneration, hf.BartConfig,
        {
            **_IDS, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0,
            "encoder_attention_heads": 8, "decoder_attention_heads": 8, "encoder_ffn_dim": 96,
            "decoder_ffn_dim": 96, "max_position_embeddings": 16, "use_cache": False,
            "decoder_start_token_id": 2, "forced_eos_token_id": None,
        },
        ".layers.",
    ),
    "vit": Architecture(
        hf.ViTForImageClassification, hf.ViTConfig,
        {**_ENCODER, "image_size": 16, "patch_size": 4, "num_labels": 5}, ".layers.", "image",
    ),
    "swin": Architecture(
        hf.SwinForImageClassification, hf.SwinConfig,
        {
            "image_size": 16, "patch_size": 2, "embed_dim": 32, "depths": [2, 2],
            "num_heads": [4, 8], "window_size": 2, "num_labels": 5, "drop_path_rate": 0.0,
        },
        ".layers.", "image",
    ),
}  # fmt: skip
