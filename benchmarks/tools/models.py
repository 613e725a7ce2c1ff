"""Models and samples of the throughput benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes of a model and its batch: a step takes `batch × accumulation × sequence` tokens."""

    hidden: int
    layers: int
    heads: int
    vocabulary: int
    sequence: int
    batch: int
    accumulation: int


SIZES = {
    # Next to nothing is computed: a step is what it costs to call operators.
    "tiny": Size(32, 24, 4, 512, 16, 2, 4),
    # Small operators: what a step costs besides them shows.
    "small": Size(128, 4, 4, 2048, 128, 4, 4),
    "medium": Size(256, 4, 4, 4096, 128, 4, 4),
    "large": Size(2048, 16, 16, 32000, 1024, 4, 4),
}


def build_model(architecture: str, size: Size) -> PreTrainedModel:
    """A model with weights drawn from a fixed seed, without dropout.

    Args:
        architecture: "gpt2" or "llama"; the head of llama has a weight of its own.
        size: its sizes.
    """
    torch.manual_seed(0)
    if architecture == "gpt2":
        config = GPT2Config(
            vocab_size=size.vocabulary,
            n_positions=size.sequence,
            n_embd=size.hidden,
            n_layer=size.layers,
            n_head=size.heads,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
            loss_type="ForCausalLM",
        )
        return GPT2LMHeadModel(config)
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        max_position_embeddings=size.sequence,
        hidden_size=size.hidden,
        intermediate_size=size.hidden * 11 // 4,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads // 2,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random sequences, whose labels are the sequences themselves."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def samples(size: Size, num_steps: int) -> Tokens:
    """Enough samples for some steps."""
    count = num_steps * size.batch * size.accumulation
    generator = torch.Generator().manual_seed(1)
    return Tokens(torch.randint(size.vocabulary, (count, size.sequence), generator=generator))
