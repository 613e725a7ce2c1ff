"""Heads in chunks: losses and gradients are those of whole logits, on one rank and on several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from merak.graph.chunked_loss import in_chunks
from tests.tiers import slow
from tests.unit.graph import tensor_parallel_cases as cases
from tests.unit.graph.lockstep import assert_parity, assert_parity_on_tokens

ROWS = 3
"""Of a chunk, which divides neither all rows nor those that count."""


def tiny(kind: str, **options: Any) -> nn.Module:
    """A causal language model with one narrow layer: what counts is behind it."""
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, vocab_size=cases.VOCABULARY, use_cache=False,
        pad_token_id=0, bos_token_id=0, eos_token_id=0, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(config)  # type: ignore[no-any-return]


class Smoothed(nn.Module):
    """A head with a bias, and a smoothed loss of weighted classes, of all tokens but the last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(cases.VOCABULARY, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.head = nn.Linear(32, cases.VOCABULARY)
        self.register_buffer("of_class", torch.rand(cases.VOCABULARY) + 0.5)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        logits = self.head(x + self.down(self.up(x).relu()))[:, :-1]
        loss = nn.CrossEntropyLoss(self.of_class, label_smoothing=0.1)
        return loss(logits.reshape(-1, logits.shape[-1]), labels[:, 1:].flatten())


MODELS = {
    "llama": lambda: tiny("Llama", tie_word_embeddings=True),
    "capped": lambda: tiny("Gemma2"),  # a cap: division, tanh, product
    "scaled": lambda: tiny("Cohere"),  # a product
    "smoothed": Smoothed,
}


def batch(ignored: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, cases.VOCABULARY, (2, 8), generator=generator)
    labels = ids.clone()
    if ignored:
        labels[:, 2:5] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize(
    ("kind", "degree", "sequence"),
    [
        *((kind, degree, False) for kind in MODELS for degree in (1, 2)),
        ("llama", 2, True),
        *(slow(kind, 2, True) for kind in MODELS if kind != "llama"),
    ],
)
def test_training_is_that_of_whole_logits(kind: str, degree: int, sequence: bool) -> None:
    chunk_bytes = 4 * ROWS * -(-cases.VOCABULARY // degree)
    assert_parity(
        MODELS[kind](),
        batch(ignored=kind != "scaled"),
        None,
        degree,
        sequence=sequence,
        chunk_bytes=chunk_bytes,
    )


@pytest.mark.parametrize("kind", ["llama", "capped"])
def test_ranks_that_share_tokens_have_chunks_of_their_own(kind: str) -> None:
    assert_parity_on_tokens(MODELS[kind](), batch(True), 2, 4 * ROWS * cases.VOCABULARY)


@pytest.mark.parametrize(
    ("samples", "trains", "has_chunks"), [(2, True, True), (1, True, False), (1, False, True)]
)
def test_chunks_that_would_hold_more_are_not_made(
    samples: int, trains: bool, has_chunks: bool
) -> None:
    """In bfloat16, 8 tokens take less than the float32 gradient of a head of width 32."""
    model = tiny("Llama").to(torch.bfloat16)
    model.lm_head.requires_grad_(trains)
    columns = {name: column[:samples] for name, column in batch(False).items()}
    graph = cases.traced(model, columns).segments[-1].graph
    assert (in_chunks(graph, 4 * cases.VOCABULARY) is not None) is has_chunks
