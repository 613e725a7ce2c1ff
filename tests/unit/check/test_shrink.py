"""Small versions of configs: their fields still fit together, and the user's stay."""

from typing import Any

import pytest
import transformers
from transformers import PreTrainedConfig

from merak.check.shrink import VERSIONS, Wanted, attempts


def smallest(config: PreTrainedConfig, given: dict[str, Any] | None = None) -> dict[str, Any]:
    return next(attempts(config, given or {}))


@pytest.mark.parametrize(
    "name",
    ["GPT2Config", "LlamaConfig", "MixtralConfig", "T5Config", "BartConfig", "FalconConfig"],
)
def test_widths_keep_their_relations(name: str) -> None:
    config = getattr(transformers, name)()
    small = type(config)(**smallest(config))
    assert small.num_hidden_layers == 2
    assert small.vocab_size == 128
    assert small.hidden_size <= 64
    per_head = config.hidden_size * small.num_attention_heads
    assert small.hidden_size % small.num_attention_heads == 0
    assert small.hidden_size * config.num_attention_heads <= per_head
    groups = getattr(config, "num_key_value_heads", None)
    if groups not in (None, config.num_attention_heads):
        assert small.num_attention_heads % small.num_key_value_heads == 0
        assert small.num_key_value_heads < small.num_attention_heads


def test_fused_sizes_stay_sums_of_their_parts() -> None:
    small = transformers.DeepseekV3Config(**smallest(transformers.DeepseekV3Config()))
    assert small.qk_head_dim == small.qk_nope_head_dim + small.qk_rope_head_dim
    assert (small.n_routed_experts, small.num_experts_per_tok, small.n_group) == (4, 2, 2)


def test_every_kind_of_layer_is_kept() -> None:
    config = transformers.Gemma3TextConfig()
    small = type(config)(**smallest(config))
    assert small.num_hidden_layers == len(small.layer_types)
    assert set(small.layer_types) == set(config.layer_types)
    assert small.sliding_window == 16


def test_special_tokens_stay_in_the_vocabulary_and_apart() -> None:
    config = transformers.BartConfig(vocab_size=60000, bos_token_id=50000, eos_token_id=50001)
    fields = smallest(config)
    tokens = {fields[f"{name}_token_id"] for name in ("bos", "eos")}
    assert len(tokens) == 2 and max(tokens) < 128


def test_the_users_fields_stay() -> None:
    given = {"n_layer": 5, "n_embd": 48, "vocab_size": 1000}
    fields = smallest(transformers.GPT2Config(**given), given)
    assert not set(given) & set(fields)
    assert "n_head" not in fields  # bound by the user's width
    assert fields["n_positions"] == 128


def test_configs_inside_are_shrunk_too() -> None:
    fields = smallest(transformers.CLIPConfig())
    assert fields["text_config"]["num_hidden_layers"] == 2
    assert fields["vision_config"]["image_size"] == 64
    given = {"text_config": {"num_hidden_layers": 3}}
    assert "num_hidden_layers" not in smallest(transformers.CLIPConfig(), given)["text_config"]


def test_degrees_fit_the_small_version_as_they_fit_the_model() -> None:
    config = transformers.GPT2Config()  # 12 heads
    assert [
        next(attempts(config, {}, Wanted(2, tp))).get("n_head", 12) % tp == 0
        for tp in (1, 2, 3, 4, 5, 6, 12)
    ] == [True, True, True, True, False, True, True]
    assert next(attempts(config, {}, Wanted(layers=7)))["n_layer"] == 7


def test_the_last_version_is_the_model_as_it_is() -> None:
    versions = list(attempts(transformers.LlamaConfig(), {}))
    assert versions[-1] == {}
    assert 1 < len(versions) <= len(VERSIONS)
