"""Feature dicts: patterns, JSON, and transformers' own plans."""

from __future__ import annotations

import json
from typing import Any

import pytest
import transformers

from merak.core.errors import ShardError
from merak.graph.tensor_parallel.apply import tensor_parallel
from merak.graph.tensor_parallel.features import (
    Column,
    Replicate,
    Row,
    features_from_plan,
    given_plan,
    parse_features,
    resolve_features,
)
from tests.unit.graph import tensor_parallel_cases as cases
from tests.unit.graph.architectures import ARCHITECTURES
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


def test_written_in_json() -> None:
    written = json.loads(
        '{"*.attn.c_attn": {"column": [1, 1, 1]}, "*.c_proj": "row", "*.c_fc": "column",'
        ' "*.gate": "replicate", "*.down": {"row": [2, 1]}}'
    )
    assert parse_features(written) == {
        "*.attn.c_attn": Column(parts=(1, 1, 1)),
        "*.c_proj": Row(),
        "*.c_fc": Column(),
        "*.gate": Replicate(),
        "*.down": Row(parts=(2, 1)),
    }


def test_objects_stay_as_they_are_in_their_order() -> None:
    given = {"b": Row(), "a": Column(parts=(3, 1))}
    assert list(parse_features(given).items()) == list(given.items())
    assert parse_features({}) == {}


@pytest.mark.parametrize(
    "value",
    [
        "columns",
        3,
        None,
        ["column"],
        {},
        {"column": [1], "row": [1]},
        {"column": []},
        {"column": [0, 1]},
        {"column": [1.5]},
        {"column": 3},
        {"replicate": [1]},
        {"diagonal": [1]},
    ],
)
def test_attributes_that_are_none(value: Any) -> None:
    with pytest.raises(ShardError) as caught:
        parse_features({"*.c_fc": value})
    assert f"the feature dict gives '*.c_fc' the attribute {value!r}; write 'column'" in str(
        caught.value
    )


LLAMA = ARCHITECTURES["llama"]


def test_styles_become_attributes() -> None:
    plan = {"q": "colwise", "o": "rowwise", "up": "packed_colwise", "n": "replicate"}
    plan["head"] = "colwise_gather_output"
    assert features_from_plan(plan) == {
        "q": Column(),
        "o": Row(),
        "up": Column(parts=(1, 1)),
        "n": Replicate(),
    }


def test_a_style_that_nobody_knows() -> None:
    with pytest.raises(ShardError, match=r"gives 'q' the style 'sideways', which Merak does not"):
        features_from_plan({"q": "sideways"})


def test_only_a_plan_that_was_given_counts() -> None:
    assert given_plan(LLAMA.build()) is None
    model = LLAMA.build(base_model_tp_plan={"layers.0.mlp.*": "replicate"})
    features = given_plan(model)
    assert features == {"layers.0.mlp.*": Replicate()}
    weights = tensor_parallel(cases.traced(model, LLAMA.batch()), features, 2).weights
    assert not any("layers.0.mlp" in name for name in weights)
    assert any("layers.1.mlp" in name for name in weights)


def test_a_plan_of_transformers_own_fits_the_graph() -> None:
    model = LLAMA.build()
    features = features_from_plan(type(model.config).base_model_tp_plan)
    graph = cases.traced(model, LLAMA.batch())
    derived = tensor_parallel(graph, None, 2).weights
    assert tensor_parallel(graph, features, 2).weights == derived


def test_a_wrong_plan_is_refused_with_the_operator_that_breaks_it() -> None:
    phi3 = ARCHITECTURES["phi3"]
    graph = cases.traced(phi3.build(), phi3.batch())
    features = features_from_plan({"layers.*.self_attn.qkv_proj": "colwise"})
    message = r"at slice\w* \(aten\.slice\.Tensor, in model\.layers\.0\.self_attn, .*takes 0 … 64"
    with pytest.raises(ShardError, match=message):
        tensor_parallel(graph, features, 2)
