import pytest
import transformers

from merak.core.errors import ShardError
from merak.graph.tensor_parallel.features import Column, Replicate, Row, resolve_features
from tests.unit.graph.tensor_parallel_cases import BERT, GPT2

GPT2_BLOCK = [
    f"transformer.h.{layer}.{module}.{kind}"
    for layer in range(2)
    for module in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    for kind in ("weight", "bias")
]


def bert_names() -> list[str]:
    config = transformers.BertConfig(
        hidden_size=8, num_attention_heads=2, intermediate_size=16, num_hidden_layers=1
    )
    model = transformers.BertForMaskedLM(config)
    return [name for name, _ in model.named_parameters()]


def test_patterns_are_ends_of_module_paths() -> None:
    attributes = resolve_features(GPT2, GPT2_BLOCK)
    assert attributes["transformer.h.1.attn.c_attn.weight"] == Column((1, 1, 1), "heads")
    assert attributes["transformer.h.0.attn.c_attn.bias"] == Column((1, 1, 1), "heads")
    assert isinstance(attributes["transformer.h.0.mlp.c_proj.weight"], Row)
    assert "transformer.h.0.ln_1.weight" not in attributes
    assert len(attributes) == 2 * 4 * 2


def test_bert_tells_the_two_output_layers_and_the_head_apart() -> None:
    attributes = resolve_features(BERT, bert_names())
    layer = "bert.encoder.layer.0"
    assert attributes[f"{layer}.attention.output.dense.weight"] == Row(size="heads")
    assert attributes[f"{layer}.output.dense.weight"] == Row(size="feed-forward units")
    assert not any(name.startswith("cls.") for name in attributes)


def test_the_last_matching_pattern_counts() -> None:
    features = {**GPT2, "h.0.mlp.*": Replicate(), "h.0.mlp.c_fc.bias": Row()}
    attributes = resolve_features(features, GPT2_BLOCK)
    assert attributes["transformer.h.0.mlp.c_fc.weight"] == Replicate()
    assert attributes["transformer.h.0.mlp.c_fc.bias"] == Row()
    assert isinstance(attributes["transformer.h.1.mlp.c_fc.weight"], Column)


def test_a_pattern_may_use_a_tied_name() -> None:
    attributes = resolve_features(
        {"lm_head": Column()}, ["wte.weight"], {"lm_head.weight": "wte.weight"}
    )
    assert attributes == {"wte.weight": Column()}


def test_a_pattern_that_matches_nothing_is_named() -> None:
    with pytest.raises(ShardError, match=r"'attn\.qkv' matches no parameter"):
        resolve_features({**GPT2, "attn.qkv": Column()}, GPT2_BLOCK)
    with pytest.raises(ShardError, match=r"'c_attn\.weights'"):
        resolve_features({"c_attn.weights": Column()}, GPT2_BLOCK)
