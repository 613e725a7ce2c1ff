"""Small models of every family that the tests of weights use."""

from collections.abc import Callable

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

SPECIAL = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
FEED_FORWARD = {"intermediate_size": 128}


def gpt2() -> nn.Module:
    config = GPT2Config(n_layer=2, n_embd=64, n_head=4, n_positions=64, vocab_size=200, **SPECIAL)
    return GPT2LMHeadModel(config)


def llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(**SIZES, **FEED_FORWARD, **SPECIAL, vocab_size=200, num_key_value_heads=2)
    )


def bert() -> nn.Module:
    return BertForMaskedLM(BertConfig(**SIZES, **FEED_FORWARD, vocab_size=200))


def t5() -> nn.Module:
    return T5ForConditionalGeneration(
        T5Config(vocab_size=200, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4)
    )


def vit() -> nn.Module:
    return ViTForImageClassification(ViTConfig(**SIZES, **FEED_FORWARD, image_size=64))


class Plain(nn.Module):
    """Every kind of module that initialises itself in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(200, 64, padding_idx=3)
        self.convolution = nn.Conv1d(64, 64, 3)
        self.norm = nn.BatchNorm1d(64)
        self.lstm = nn.LSTM(64, 64)
        self.attention = nn.MultiheadAttention(64, 2)
        self.position = nn.Parameter(torch.randn(1, 50, 64) * 0.02)
        self.token = nn.Parameter(torch.zeros(16, 64, 64))
        self.head = nn.Linear(64, 200, bias=False)
        nn.init.trunc_normal_(self.token, std=0.02)
        self.head.weight = self.embedding.weight


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
    "t5": t5,
    "vit": vit,
    "plain": Plain,
}
PRETRAINED = {name: build for name, build in FAMILIES.items() if name != "plain"}
