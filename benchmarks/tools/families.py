"""Small models of many architectures, with batches, for the side-by-side comparison.

Nothing here needs Merak: every framework's own environment reads this file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn

VOCABULARY, SEQUENCE, SAMPLES, MICROBATCHES = 96, 16, 8, 4
Batch = dict[str, torch.Tensor]

SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "max_position_embeddings": 32, "use_cache": False,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None,
}  # fmt: skip
"""Fields that most configurations have."""
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture in a small version.

    Args:
        cls: the class in transformers.
        middle: the module before which two stages part.
        config: fields in place of the configuration's own.
        inputs: "tokens", "pairs" (encoder and decoder) or "pixels".
        shifted: whether every token predicts the next one.
    """

    cls: str
    middle: str
    config: dict[str, Any] = field(default_factory=dict)
    inputs: str = "tokens"
    shifted: bool = True

    def model(self) -> nn.Module:
        """The model with weights from a fixed seed, without dropout, in training mode."""
        cls = getattr(transformers, self.cls)
        config = cls.config_class(**self.config)
        for name, value in config.to_dict().items():
            if name.endswith(("dropout", "pdrop", "drop", "_dropout_prob", "dropout_rate")):
                setattr(config, name, type(value)(0) if value is not None else None)
        torch.manual_seed(0)
        model: nn.Module = cls(config)
        return model.train()

    def batch(self) -> Batch:
        """All samples of a step, labels included."""
        generator = torch.Generator().manual_seed(1)
        if self.inputs == "pixels":
            pixels = torch.randn(SAMPLES, 3, 16, 16, generator=generator)
            labels = torch.randint(2, (SAMPLES,), generator=generator)
            return {"pixel_values": pixels, "labels": labels}
        shape = (SAMPLES, SEQUENCE)
        tokens = torch.randint(1, VOCABULARY, shape, generator=generator)
        if self.inputs == "pairs":
            into = torch.randint(1, VOCABULARY, shape, generator=generator)
            labels = torch.randint(1, VOCABULARY, shape, generator=generator)
            return {"input_ids": tokens, "decoder_input_ids": into, "labels": labels}
        return {"input_ids": tokens, "labels": tokens.clone()}

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The model's own loss, of its logits."""
        if self.shifted:
            labels = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
        classes = logits.shape[-1]
        return nn.functional.cross_entropy(logits.reshape(-1, classes).float(), labels.reshape(-1))


def microbatches(batch: Batch) -> list[Batch]:
    """A step's batch in equal parts."""
    parts = {name: value.chunk(MICROBATCHES) for name, value in batch.items()}
    return [{name: parts[name][n] for name in parts} for n in range(MICROBATCHES)]


def expected_gradients(family: Family) -> dict[str, torch.Tensor]:
    """Gradients of one process, by every name that a parameter has."""
    model = family.model()
    for part in microbatches(family.batch()):
        (model(**part).loss / MICROBATCHES).backward()
    named = model.named_parameters(remove_duplicate=False)
    return {name: p.grad for name, p in named if p.grad is not None}


def _decoder(cls: str, middle: str = "model.layers.2", **config: Any) -> Family:
    return Family(cls, middle, {**SIZES, **config})


_EXPERTS = {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES = {
    "GPT-2": Family(
        "GPT2LMHeadModel",
        "transformer.h.2",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 32,
         "bos_token_id": 0, "eos_token_id": 0, "use_cache": False},
    ),
    "OPT": _decoder("OPTForCausalLM", "model.decoder.layers.2", ffn_dim=64, word_embed_proj_dim=32),
    "Bloom": _decoder("BloomForCausalLM", "transformer.h.2", n_layer=4, n_head=4),
    "GPT-NeoX": _decoder("GPTNeoXForCausalLM", "gpt_neox.layers.2"),
    "Llama": _decoder("LlamaForCausalLM", **GROUPED),
    "Llama, tied": _decoder("LlamaForCausalLM", **GROUPED, tie_word_embeddings=True),
    "Mistral": _decoder("MistralForCausalLM", **GROUPED),
    "Qwen3": _decoder("Qwen3ForCausalLM", **GROUPED),
    "Gemma 2": _decoder("Gemma2ForCausalLM", **GROUPED),
    "Phi-3": _decoder("Phi3ForCausalLM", **GROUPED),
    "Mixtral": _decoder("MixtralForCausalLM", **GROUPED, num_local_experts=4),
    "Qwen3-MoE": _decoder("Qwen3MoeForCausalLM", **_EXPERTS),
    "BERT": Family("BertForMaskedLM", "bert.encoder.layer.2", dict(SIZES), shifted=False),
    "T5": Family(
        "T5ForConditionalGeneration",
        "decoder",
        {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2,
         "num_heads": 4, "use_cache": False, "decoder_start_token_id": 0},
        inputs="pairs",
        shifted=False,
    ),
    "ViT": Family(
        "ViTForImageClassification",
        "vit.layers.2",
        {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
         "num_attention_heads": 4, "image_size": 16, "patch_size": 4, "num_labels": 2},
        inputs="pixels",
        shifted=False,
    ),
}  # fmt: skip
"""Small versions by name."""
