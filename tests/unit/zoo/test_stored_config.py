"""Configs as hubs have them, some written by years-old versions: changes of them are not lost."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import GptOssConfig, Mamba2Config

from merak.core.errors import CommandError
from merak.zoo.model_source import resolve_model
from merak.zoo.stored_config import with_fewer_layers

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16",
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "rope_theta": 5e5,
    "rope_scaling": {"type": "linear", "factor": 8.0},
}  # fmt: skip
"""Fields of version 4: transformers 5 reads three of them under other names."""

VISION = {
    "model_type": "qwen2_vl", "architectures": ["Qwen2VLForConditionalGeneration"],
    "hidden_size": 512, "num_attention_heads": 4, "num_hidden_layers": 3, "rope_theta": 1e6,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
}  # fmt: skip
"""What is the text's config today lay beside the vision's."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    return tmp_path


def test_infinity(tmp_path: Path) -> None:
    config = Mamba2Config(architectures=["Mamba2ForCausalLM"])  # `time_step_limit` ends nowhere
    config.save_pretrained(tmp_path)
    assert list(resolve_model(str(tmp_path)).config.time_step_limit) == [0.0, math.inf]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}),
        ({"rope_parameters": {"factor": 2.0}}, {"factor": 2.0, "rope_theta": 5e5}),
        ({"rope_scaling": {"factor": 2.0}}, {"factor": 2.0, "rope_theta": 5e5}),
        ({"rope_scaling": None}, {"rope_type": "default", "rope_theta": 5e5}),
        ({"rope_theta": 3.0}, {"factor": 8.0, "rope_theta": 3.0}),
    ],
)
def test_changes_by_old_and_new_names(
    folder: Path, change: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = resolve_model(str(folder), change).config.rope_parameters
    assert {name: found.get(name) for name in expected} == expected


def test_what_follows_from_other_fields_goes_on_to_follow(folder: Path) -> None:
    assert resolve_model(str(folder), {"num_attention_heads": 8}).config.head_dim == 8


def test_fields_that_moved_into_a_config_inside(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(VISION), encoding="utf-8")
    config = resolve_model(str(tmp_path), {"text_config": {"vocab_size": 99}}).config
    text = config.text_config
    assert (text.num_hidden_layers, text.hidden_size, text.vocab_size) == (3, 512, 99)
    assert text.rope_parameters["mrope_section"] == [16, 24, 24]
    assert text.rope_parameters["rope_theta"] == 1e6


def test_a_model_of_fewer_layers_is_the_first_ones(tmp_path: Path) -> None:
    config = GptOssConfig(num_hidden_layers=6, architectures=["GptOssForCausalLM"])
    config.save_pretrained(tmp_path)  # with a `layer_types` for each of them
    found = resolve_model(str(tmp_path), {"num_hidden_layers": 3}).config
    assert found.layer_types == config.layer_types[:3]
    kinds = ["full_attention"] * 3
    given = {"num_hidden_layers": 3, "layer_types": kinds}
    assert resolve_model(str(tmp_path), given).config.layer_types == kinds
    with pytest.raises(CommandError, match="layer_types"):  # of what kind the seventh is, who knows
        resolve_model(str(tmp_path), {"num_hidden_layers": 7})


def test_fewer_layers_of_a_config_inside() -> None:
    own = {str(number): {"head_dim": 64} for number in (1, 5)}
    text = {"num_hidden_layers": 6, "layer_types": list("abcdef"), "per_layer_config": own}
    fields = {"text_config": {**text, "hybrid_layer_ids": [2, 4], "sizes": [1, 2]}, "depth": 6}
    found = with_fewer_layers(fields, {"text_config": {"num_hidden_layers": 3}})
    assert found == {
        "text_config": {
            "num_hidden_layers": 6,  # the change itself comes after
            "layer_types": ["a", "b", "c"],
            "per_layer_config": {"1": {"head_dim": 64}},
            "hybrid_layer_ids": [2],
            "sizes": [1, 2],
        },
        "depth": 6,
    }
