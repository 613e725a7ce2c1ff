"""Tiny transformers of several families, and a batch for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import nn

VOCABULARY = 40


def causal(config: type[Any], model: type[Any], layers: int, **own: Any) -> nn.Module:
    """A language model that gives no cache, with special tokens inside its tiny vocabulary."""
    common = {"vocab_size": VOCABULARY, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0}
    made: nn.Module = model(config(**common, **_depth(config, layers), **own))
    return made


def _depth(config: type[Any], layers: int) -> dict[str, int]:
    return {config.attribute_map.get("num_hidden_layers", "num_hidden_layers"): layers}


def gpt2(layers: int, **own: Any) -> nn.Module:
    settings = {"n_embd": 16, "n_head": 2, "n_positions": 16}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return causal(
        transformers.GPT2Config, transformers.GPT2LMHeadModel, layers, **settings, **dropout | own
    )


SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}


def llama(layers: int, **own: Any) -> nn.Module:
    return causal(
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        layers,
        num_key_value_heads=1,
        **SIZES,
        **own,
    )


def neox(layers: int, **own: Any) -> nn.Module:
    return causal(
        transformers.GPTNeoXConfig, transformers.GPTNeoXForCausalLM, layers, **SIZES, **own
    )


def mixtral(layers: int, **own: Any) -> nn.Module:
    return causal(
        transformers.MixtralConfig,
        transformers.MixtralForCausalLM,
        layers,
        num_key_value_heads=1,
        num_local_experts=4,
        **SIZES,
        **own,
    )


def bert(layers: int, **own: Any) -> nn.Module:
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=16,
        num_hidden_layers=layers,
        **SIZES,
        **dropout | own,
    )
    return transformers.BertForMaskedLM(config)


def vit(layers: int, **own: Any) -> nn.Module:
    config = transformers.ViTConfig(
        image_size=8, patch_size=4, num_labels=5, num_hidden_layers=layers, **SIZES, **own
    )
    return transformers.ViTForImageClassification(config)


def t5(layers: int, **own: Any) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_ff=24,
        d_kv=8,
        num_layers=layers,
        num_heads=2,
        use_cache=False,
        decoder_start_token_id=0,
        pad_token_id=0,
        **{"dropout_rate": 0.0} | own,
    )
    return transformers.T5ForConditionalGeneration(config)


FAMILIES: Mapping[str, Callable[..., nn.Module]] = {
    "gpt2": gpt2,
    "llama": llama,
    "neox": neox,
    "mixtral": mixtral,
    "bert": bert,
    "vit": vit,
    "t5": t5,
}


def batch_for(family: str, *, mask: bool = False) -> dict[str, torch.Tensor]:
    """Two samples; the first one's last three tokens are padding if there is a mask."""
    if family == "vit":
        return {"pixel_values": torch.randn(2, 3, 8, 8), "labels": torch.randint(5, (2,))}
    batch = {name: torch.randint(VOCABULARY, (2, 8)) for name in ("input_ids", "labels")}
    if mask:
        batch["attention_mask"] = torch.ones(2, 8, dtype=torch.long)
        batch["attention_mask"][0, -3:] = 0
    return batch
