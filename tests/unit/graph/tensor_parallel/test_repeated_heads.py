"""Fewer heads of keys and values than ranks: each is on several ranks, none whole on all.

Every parameter's gradient is compared with one process's, on all ranks in lockstep.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from merak.graph.tensor_parallel.apply import tensor_parallel
from merak.graph.tensor_parallel.placement import Shard
from merak.graph.tensor_parallel.repeated_heads import HeadRepeater, few_heads
from merak.graph.tensor_parallel.report import replication_reasons
from tests.tiers import slow
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
    name: str, kv_heads: int, attention: str, sequence: bool, monkeypatch: pytest.MonkeyPatch
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
    assert_parity(built, columns, None, degree, monkeypatch, sequence=sequence)


def test_heads_that_are_read_together_stay_whole() -> None:
    """Norms over all heads of a token, and a degree that is no multiple of them."""
    columns = cases.batch(padded=False)
    assert not few_heads(cases.traced(model("Olmo2", 2), columns), 8)
    graph = cases.traced(model("Llama", 2), columns)
    assert not few_heads(graph, 3)
    assert not few_heads(graph, 2)
    assert few_heads(graph, 4)
    assert HeadRepeater(4, ()).model(graph) is graph


def test_a_segment_is_rewritten_once() -> None:
    graph = cases.traced(model("Llama", 2), cases.batch(padded=False))
    repeater = HeadRepeater(8, few_heads(graph, 8))
    for segment in graph.segments:
        own = repeater(segment)
        assert repeater(segment) is own
        assert repeater(own).graph is own.graph
