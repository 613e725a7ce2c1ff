"""Context parallelism in one process: loss and gradients of ranks are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import transformers

from merak.ops.attention import ring
from tests.tiers import slow
from tests.unit.graph import tensor_parallel_cases as cases
from tests.unit.graph.context_parallel.test_shifted_losses import LOSSES, Shifted
from tests.unit.graph.context_parallel.test_tokens import Reordered, WrittenScores
from tests.unit.graph.lockstep import assert_parity_on_tokens


def mixtral(attention: str) -> torch.nn.Module:
    """A mixture of experts, with the loss that balances them."""
    config = transformers.MixtralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=cases.VOCABULARY, num_local_experts=4, use_cache=False,
        output_router_logits=True, router_aux_loss_coef=0.3, attn_implementation=attention,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def t5(attention: str) -> torch.nn.Module:
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, vocab_size=cases.VOCABULARY,
        dropout_rate=0.0, use_cache=False, decoder_start_token_id=0, attn_implementation=attention,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def llama_of_few_heads(attention: str, heads: int = 3) -> torch.nn.Module:
    """Heads, kv-heads and samples that two ranks cannot share; of 4 heads, they share those."""
    config = transformers.LlamaConfig(
        hidden_size=24, intermediate_size=48, num_hidden_layers=1, num_attention_heads=heads,
        num_key_value_heads=1, vocab_size=cases.VOCABULARY, use_cache=False,
        attn_implementation=attention,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


COMMON = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": cases.VOCABULARY, "use_cache": False,
    "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
SCALED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4}
LATENT = {
    "q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4,
    "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
}  # fmt: skip
WINDOWED = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "rotary scaling": ("Llama", {"rope_parameters": {**SCALED, "rope_theta": 10000.0}}),
    "sliding windows": ("Gemma3Text", {**WINDOWED, "head_dim": 8}),
    "windows of Qwen": ("Qwen2", {**WINDOWED, "use_sliding_window": True}),
    "sinks": ("GptOss", {**WINDOWED, "head_dim": 8, "num_local_experts": 4}),
    "biases by distance": ("Bloom", {"n_head": 4, "n_layer": 2}),
    "latent attention": ("DeepseekV3", LATENT),
}
"""Kinds of attention: the model's configuration, and what is its own there."""


def published(kind: str, attention: str) -> torch.nn.Module:
    """A small version of a model with a kind of attention."""
    name, own = PUBLISHED[kind]
    values = {**COMMON, **own}
    config = getattr(transformers, f"{name}Config")(**values, attn_implementation=attention)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def of_tokens(kind: Callable[[], torch.nn.Module], attention: str) -> torch.nn.Module:
    """A plain module that has no attention of transformers'."""
    return kind()


OTHERS = {
    "reordered": partial(of_tokens, Reordered),
    "written scores": partial(of_tokens, WrittenScores),
    "mixtral": mixtral,
    "t5": t5,
    "few heads": llama_of_few_heads,
    **{kind: partial(published, kind) for kind in PUBLISHED},
    **{kind: partial(of_tokens, partial(Shifted, kind)) for kind in LOSSES},
}

CHANGED = {
    "second of two": (True, False),
    "behind another": (True, True),
    "end of one": (False, False),
    "end of another": (False, True),
}
"""Batches whose last three tokens alone have labels: (are they a document of their own?, are the
tokens in front of them others?)."""
PACKED = {"packed": (True, False), **CHANGED}


def case(
    family: str, attention: str, dropout: float, padded: bool
) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A model, and its batch; "packed" has documents behind one another in a sample."""
    columns = cases.batch(padded)
    if family in OTHERS:
        torch.manual_seed(0)
        if family in ("reordered", "written scores", *LOSSES):
            columns = {"input_ids": columns["input_ids"] % 16}
        if family == "few heads":
            columns = {name: column[:1] for name, column in columns.items()}
        return OTHERS[family](attention).train(), columns
    if family in PACKED:
        is_packed, is_changed = PACKED[family]
        columns = {name: column[:1].clone() for name, column in cases.batch(False).items()}
        ends = [0, 1, 2] if is_packed else [5, 6, 7]
        columns["position_ids"] = torch.tensor([[0, 1, 2, 3, 4, *ends]])
        columns["labels"][0, 5] = -100
        if family in CHANGED:
            columns["labels"][0, :5] = -100
            if is_changed:
                columns["input_ids"][0, :5] = (columns["input_ids"][0, :5] + 7) % cases.VOCABULARY
        return cases.build("llama", attention, dropout), columns
    return cases.build(family, attention, dropout), columns


@pytest.mark.parametrize(
    ("family", "attention", "degree", "dropout", "padded"),
    [
        ("llama", "sdpa", 2, 0.2, True),
        ("gpt2", "sdpa", 2, 0.2, True),
        ("bert", "eager", 2, 0.2, True),
        slow("gpt2", "eager", 2, 0.0, False),
        ("bert", "sdpa", 4, 0.0, True),
    ],
)
def test_ranks_equal_one_process(
    family: str, attention: str, degree: int, dropout: float, padded: bool
) -> None:
    _, said = assert_parity_on_tokens(*case(family, attention, dropout, padded), degree)
    assert said is None


@pytest.mark.parametrize(
    ("family", "attention", "padded"),
    [
        ("mixtral", "sdpa", True),
        ("packed", "sdpa", False),
        ("reordered", "sdpa", False),
        ("written scores", "sdpa", False),
        ("flat", "sdpa", False),
        ("few heads", "eager", True),
        ("t5", "eager", True),
        *(slow(kind, "eager", True) for kind in PUBLISHED),
    ],
)
def test_other_models_equal_one_process(family: str, attention: str, padded: bool) -> None:
    assert_parity_on_tokens(*case(family, attention, 0.0, padded), 2)


@pytest.mark.parametrize("kind", ["causal", "padded", "packed"])
def test_keys_of_heads_that_no_ranks_share_pass_around_a_ring(kind: str) -> None:
    model, columns = case("few heads", "sdpa", 0.0, kind == "padded")
    if kind == "packed":
        columns = case("packed", "sdpa", 0.0, False)[1]
    with mock.patch.object(ring, "attend_block", wraps=ring.attend_block) as blocks:
        assert_parity_on_tokens(model, columns, 2)
    assert blocks.called


def test_keys_that_queries_of_several_ranks_share_are_sent_to_each() -> None:
    columns = {name: column[:1] for name, column in cases.batch(False).items()}
    with mock.patch.object(ring, "attend_block", wraps=ring.attend_block) as blocks:
        _, said = assert_parity_on_tokens(llama_of_few_heads("sdpa", 4), columns, 4)
    assert said is None and not blocks.called


def test_packed_documents_do_not_see_each_other() -> None:
    runs = {family: case(family, "sdpa", 0.0, False) for family in CHANGED}
    losses = {family: assert_parity_on_tokens(*run, 2)[0] for family, run in runs.items()}
    assert losses["behind another"] == pytest.approx(losses["second of two"], rel=1e-6)
    assert losses["end of another"] != pytest.approx(losses["end of one"], rel=1e-3)
