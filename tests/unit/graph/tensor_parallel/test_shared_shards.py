"""Heads that the ranks do not divide: several ranks have the same ones, none has all.

Every parameter's gradient is compared with one process's, on all ranks in lockstep.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from merak.graph.tensor_parallel.apply import tensor_parallel
from merak.graph.tensor_parallel.placement import Shard
from merak.graph.tensor_parallel.report import replication_reasons
from tests.tiers import one_in, slow
from tests.unit.graph import tensor_parallel_cases as cases
from tests.unit.graph.lockstep import assert_parity

FIELDS: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 8,
    "head_dim": 8, "vocab_size": cases.VOCABULARY, "max_position_embeddings": 64,
    "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip


def model(name: str, kv_heads: int, attention: str = "sdpa", **fields: Any) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(hf, f"{name}Config")(
        **{**FIELDS, "num_key_value_heads": kv_heads, "attn_implementation": attention, **fields}
    )
    built: nn.Module = getattr(hf, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in built.parameters():  # biases and norms have values, too
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return built.train()


@pytest.mark.parametrize(
    ("name", "kv_heads", "attention", "sequence"),
    [
        ("Qwen2", 2, "sdpa", False),  # with biases
        ("Qwen3", 2, "eager", True),  # with norms of heads
        slow("Llama", 4, "sdpa", False),
        slow("Llama", 2, "sdpa", True),
        slow("Gemma2", 2, "eager", False),
        slow("Cohere", 2, "sdpa", False),
    ],
)
def test_gradients_equal_those_of_one_process(
    name: str, kv_heads: int, attention: str, sequence: bool
) -> None:
    built, columns, degree = model(name, kv_heads, attention), cases.batch(padded=False), 8
    if sequence:
        degree = 4
    graph = cases.traced(built, columns)
    weights = tensor_parallel(graph, None, degree).weights
    few = {name: p for name, p in weights.items() if isinstance(p, Shard) and p.copies > 1}
    assert {n.split(".")[-2] for n in few} == {"k_proj", "v_proj"}
    assert {p.copies for p in few.values()} == {degree // kv_heads}
    assert not any(
        "_proj" in name for name in replication_reasons(graph, tensor_parallel(graph, None, degree))
    )
    assert_parity(built, columns, None, degree, sequence=sequence)


def bert(attention: str, dropout: float) -> nn.Module:
    return hf.BertForMaskedLM(
        hf.BertConfig(
            hidden_size=48, intermediate_size=64, num_hidden_layers=1, num_attention_heads=6,
            vocab_size=cases.VOCABULARY, max_position_embeddings=16, hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout, attn_implementation=attention,
        )
    )  # fmt: skip


def gpt2(attention: str, dropout: float) -> nn.Module:
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(
            n_layer=1, n_embd=48, n_head=6, vocab_size=cases.VOCABULARY, n_positions=16,
            resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=0,
            eos_token_id=0, use_cache=False, attn_implementation=attention,
        )
    )  # fmt: skip


def t5(attention: str, dropout: float) -> nn.Module:
    return hf.T5ForConditionalGeneration(
        hf.T5Config(
            d_model=96, d_kv=8, d_ff=64, num_layers=1, num_heads=12, dropout_rate=dropout,
            vocab_size=cases.VOCABULARY, decoder_start_token_id=0, pad_token_id=0,
            attn_implementation=attention,
        )
    )  # fmt: skip


def bloom(attention: str, dropout: float) -> nn.Module:
    return hf.BloomForCausalLM(
        hf.BloomConfig(
            hidden_size=48, n_layer=1, n_head=6, vocab_size=cases.VOCABULARY,
            hidden_dropout=dropout, attention_dropout=dropout, use_cache=False,
            attn_implementation=attention,
        )
    )  # fmt: skip


def qwen2(attention: str, dropout: float) -> nn.Module:
    fields = {"num_attention_heads": 6, "attention_dropout": dropout, "use_cache": False}
    return model("Qwen2", 2, attention, **fields)


def norms_over_heads(attention: str, dropout: float) -> nn.Module:
    fields = {"num_attention_heads": 12, "hidden_size": 96, "attention_dropout": dropout}
    return model("Olmo2", 12, attention, **fields)


@one_in(6)
@pytest.mark.parametrize(
    ("build", "degree", "attention", "dropout", "sequence"),
    [
        (bert, 4, "eager", 0.0, False),
        (gpt2, 4, "sdpa", 0.1, True),  # three fused parts
        (t5, 8, "eager", 0.0, False),  # learned biases of positions, one for every head
        (bloom, 4, "eager", 0.1, False),  # heads and samples in one dim
        (qwen2, 4, "sdpa", 0.0, False),  # few kv-heads besides
        (norms_over_heads, 8, "eager", 0.0, False),
        slow(bert, 4, "sdpa", 0.1, True),
        slow(gpt2, 4, "eager", 0.1, False),
        slow(t5, 8, "eager", 0.1, True),
        slow(bloom, 4, "eager", 0.0, True),
        slow(qwen2, 4, "eager", 0.1, True),
    ],
)
def test_groups_of_ranks_share_heads(
    build: Callable[[str, float], nn.Module],
    degree: int,
    attention: str,
    dropout: float,
    sequence: bool,
) -> None:
    """As of 6 heads on 4 ranks: 3 on each of two groups, whose ranks share out what follows."""
    torch.manual_seed(0)
    built = build(attention, dropout).train()
    # Of few tokens, sums of the shared weights' gradients would cost more than splitting saves.
    columns = {name: ids.repeat(16, 1) for name, ids in cases.batch(padded=False).items()}
    with torch.no_grad():
        for parameter in built.parameters():  # biases and norms have values, too
            parameter.add_(torch.randn_like(parameter) * 0.1)
    graph = cases.traced(built, columns)
    weights = tensor_parallel(graph, None, degree).weights
    shared = {name for name, p in weights.items() if isinstance(p, Shard) and p.copies == 2}
    matrices = {name for name in shared if len(graph.parameters[name].shape) > 1}
    assert len(matrices) in (1, 3, 9)  # fused; query, key and value; with an encoder and decoder
    behind = {name for name in weights if name not in shared and "bias" not in name}
    assert len(behind) >= len(matrices) // 3 + 2, "what follows attention is split over all ranks"
    assert_parity(built, columns, None, degree, sequence=sequence)


def test_a_number_that_shares_nothing_with_the_heads_leaves_them_whole() -> None:
    built = model("Llama", 8, intermediate_size=66)
    found = tensor_parallel(cases.traced(built, cases.batch(padded=False)), None, 3).weights
    assert any("mlp" in name for name in found)
    assert not any("self_attn" in name for name in found)
