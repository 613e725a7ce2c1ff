"""Small versions of configs: their fields still fit together, and the user's stay."""

from typing import Any

import pytest
import transformers
from transformers import PreTrainedConfig

from merak.zoo.configs.fields import flat, text_part
from merak.zoo.configs.fill_defaults import completions, missing_field
from merak.zoo.configs.layers import nearer, of_each_kind
from merak.zoo.configs.relations import agreeing, equally_wide, without_derived
from merak.zoo.configs.shrink import VERSIONS, Wanted, attempts, few_layers


def smallest(config: PreTrainedConfig, given: dict[str, Any] | None = None) -> dict[str, Any]:
    return next(attempts(config, given or {})).fields


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
    assert small.num_hidden_layers == len(small.layer_types) == 3  # a kind on both of two stages
    assert set(small.layer_types) == set(config.layer_types)
    assert small.sliding_window == 16


def test_layers_with_fields_of_their_own_are_kinds_of_layers() -> None:
    config = transformers.Gemma4TextConfig()  # wider heads in layers of full attention
    fields = smallest(type(config)(**config.to_dict()))
    assert fields["layer_types"] == ["sliding_attention", "sliding_attention", "full_attention"]
    assert fields["per_layer_config"] == {"2": {"head_dim": 2 * fields["head_dim"]}}


def test_rotary_positions_fit_the_smaller_head() -> None:
    sections = {"rope_type": "default", "mrope_section": [16, 24, 24]}
    fields = smallest(transformers.Qwen2VLTextConfig(rope_parameters=sections))
    assert sum(fields["rope_parameters"]["mrope_section"]) == 4  # half of a head
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    rope = smallest(transformers.Phi3Config(rope_parameters=factors))["rope_parameters"]
    assert (rope["short_factor"], rope["long_factor"]) == ([1.0] * 4, [2.0] * 4)


def test_layers_are_counted_where_a_list_of_kinds_says_how_many() -> None:
    kinds = ["linear_attention", "mlp"] * 5 + ["full_attention"]
    config = transformers.NemotronHConfig(layers_block_type=kinds)
    fields = smallest(config)["layers_block_type"]
    assert fields == ["linear_attention", "mlp", "linear_attention", "full_attention"]


def test_numbers_of_layers_are_no_kinds_of_them() -> None:
    config = transformers.Llama4TextConfig()  # `moe_layers` names all of its 48 layers
    fields = smallest(config)
    assert fields["moe_layers"] == list(range(fields["num_hidden_layers"])) == [0, 1, 2]


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
        next(attempts(config, {}, Wanted(2, tp))).fields.get("n_head", 12) % tp == 0
        for tp in (1, 2, 3, 4, 5, 6, 12)
    ] == [True, True, True, True, False, True, True]
    assert next(attempts(config, {}, Wanted(layers=7))).fields["n_layer"] == 7


def test_stages_of_a_hierarchy_become_narrower() -> None:
    config = transformers.ResNetConfig()
    first, plain, *_ = attempts(config, {})
    assert first.fields["hidden_sizes"] == [32, 64, 128, 256]
    assert first.fields["embedding_size"] == 8
    assert "hidden_sizes" not in plain.fields and plain.fields["depths"] == [2, 2, 2, 2]
    given = {"hidden_sizes": [64, 128, 256, 512]}
    assert "hidden_sizes" not in smallest(transformers.ResNetConfig(**given), given)
    assert smallest(transformers.MobileNetV2Config())["depth_multiplier"] == 0.25
    fields = smallest(transformers.EfficientNetConfig())
    assert (fields["depth_coefficient"], fields["width_coefficient"]) == (1.0, 0.25)
    assert fields["hidden_dim"] == 320  # both an eighth of what they were
    fields = smallest(transformers.HGNetV2Config())
    assert fields["stem_channels"] == [3, 8, 8]
    assert fields["stage_out_channels"][-1] == fields["hidden_sizes"][-1] == 256
    segformer = transformers.SegformerConfig()  # its first stage is narrow as it is
    assert "hidden_sizes" not in smallest(segformer)


def test_stages_become_narrower_where_none_may_be_shallower() -> None:
    config = transformers.CvtConfig()  # whose model reads one drop rate for each stage and layer
    first, *others = [version.fields for version in attempts(config, {})]
    assert first == {"embed_dim": [32, 96, 192], "depth": [1, 2, 2]}
    assert {"embed_dim": [32, 96, 192]} in others


def test_groups_of_channels_are_as_wide_as_they_were_where_stages_become_narrower() -> None:
    fields = smallest(transformers.BitConfig())  # 32 groups of at least 2 channels
    assert (fields["hidden_sizes"][0], fields["num_groups"]) == (32, 4)


def test_necks_become_narrower_with_what_follows_them() -> None:
    assert smallest(transformers.DPTConfig())["neck_hidden_sizes"] == [8, 8, 16, 32]
    fields = smallest(transformers.ZoeDepthConfig())  # which has no width of its own
    assert fields["neck_hidden_sizes"] == [32, 64, 128, 256]
    assert fields["bottleneck_features"] == fields["fusion_hidden_size"] == 88


def test_windows_are_shorter_than_the_sequence() -> None:
    assert smallest(transformers.MistralConfig())["sliding_window"] == 16
    assert smallest(transformers.LongformerConfig())["attention_window"] == 16
    by_layer = transformers.LEDConfig(attention_window=[8] + [512] * 11)
    assert set(smallest(by_layer)["attention_window"]) == {8, 16}


def test_heads_by_stage_keep_their_proportions() -> None:
    swin = transformers.SwinConfig()  # 3, 6, 12 and 24 heads
    assert smallest(swin)["num_heads"] == [1, 2, 4, 8]
    thirds = next(attempts(swin, {}, Wanted(heads_divisor=3)))
    assert "num_heads" not in thirds.fields


def test_the_last_version_is_the_model_as_it_is() -> None:
    versions = list(attempts(transformers.LlamaConfig(), {}))
    assert versions[-1].fields == {} and not versions[-1].is_small
    assert versions[0].is_small
    assert 1 < len(versions) <= len(VERSIONS)


def test_layers_go_on_until_a_computed_pattern_has_shown_every_kind() -> None:
    config = transformers.JambaConfig()  # attention in layers 4, 12, …; experts in 1, 3, …
    small = type(config)(**smallest(config))
    assert small.num_hidden_layers == 5
    assert set(small.layers_block_type) == set(config.layers_block_type)
    assert config.num_hidden_layers == 32  # counted on a copy


def test_layers_that_share_have_one_of_their_kind_before_them() -> None:
    config = transformers.Gemma3nTextConfig()
    small = type(config)(**smallest(config))
    half = small.num_hidden_layers - small.num_kv_shared_layers
    assert small.num_kv_shared_layers > 0
    assert set(small.layer_types[:half]) == set(small.layer_types) == set(config.layer_types)
    assert len(small.intermediate_size) == small.num_hidden_layers
    assert max(small.intermediate_size) < config.intermediate_size[0]


def test_two_layers_of_each_kind() -> None:
    kinds = ["a"] * 5 + ["b", "a", "b"]
    assert of_each_kind(kinds, 4, 1) == ["a", "a", "a", "b"]
    assert of_each_kind(kinds, 4, 2) == ["a", "a", "b", "b"]


def test_widths_of_other_configs_follow_them() -> None:
    config = transformers.CLIPConfig(vision_config={"hidden_size": 96, "num_attention_heads": 3})
    config.text_config.vision_hidden_size = 96
    changes = {"vision_config": {"hidden_size": 24}, "text_config": {"vision_hidden_size": 88}}
    agreed = agreeing(config, changes)
    assert agreed["text_config"]["vision_hidden_size"] == 24
    assert agreed["vision_config"]["hidden_size"] == 24


def test_configs_inside_that_were_equally_wide_stay_so() -> None:
    config = transformers.CLIPConfig(vision_config={"hidden_size": 512, "num_attention_heads": 8})
    assert config.text_config.hidden_size == 512
    small = {"vision_config": {"hidden_size": 32}, "text_config": {"hidden_size": 16}}
    found = equally_wide(config, small)
    assert [found[name]["hidden_size"] for name in small] == [32, 32]
    other = transformers.CLIPConfig(vision_config={"hidden_size": 768})
    assert equally_wide(other, small)["text_config"]["hidden_size"] == 16


def test_what_the_config_concludes_is_left_to_it() -> None:
    config = transformers.HrmTextConfig()
    assert config.num_hidden_layers == config.num_layers_per_stack * 8
    fields = without_derived(config, smallest(config))
    assert "num_layers_per_stack" not in fields
    small = type(config)(**fields)
    assert small.num_hidden_layers == small.num_layers_per_stack * 8 < config.num_hidden_layers


def filled(config: PreTrainedConfig) -> list[dict[str, Any]]:
    return list(completions(config))


@pytest.mark.parametrize(
    ("config", "name", "value"),
    [
        (transformers.MinistralConfig(), "head_dim", 128),
        (transformers.NemotronConfig(), "num_key_value_heads", 48),
        (transformers.Dots1Config(), "num_experts_per_tok", 2),
        (transformers.EsmConfig(), "vocab_size", 128),
        (transformers.XmodConfig(), "default_language", "en_XX"),
        (transformers.InformerConfig(), "prediction_length", 8),
        (transformers.Sapiens2HeadConfig(), "conv_out_channels", [16, 16]),
        (transformers.Lfm2MoeConfig(), "layer_types", ["full_attention"] * 32),
    ],
)
def test_open_fields_are_filled_by_their_names(
    config: PreTrainedConfig, name: str, value: object
) -> None:
    fillings = filled(config)
    assert fillings[0] == {}
    assert getattr(config, name) is None
    assert value in [f.get(name) for f in fillings]


def test_fields_that_are_set_are_not_filled() -> None:
    for fields in filled(transformers.LlamaConfig()):
        assert set(fields) <= {"use_cache"}


def test_a_field_that_one_part_lacks_is_taken_from_another() -> None:
    config = transformers.DbrxConfig()
    with pytest.raises(AttributeError) as caught:
        _ = config.attn_config.rope_theta
    assert missing_field(caught.value, config)["attn_config"]["rope_theta"] == 10000.0
    assert missing_field(ValueError("else"), config) == {}


def test_layers_whose_outputs_are_taken_stay_as_many() -> None:
    small = smallest(transformers.DPTConfig())
    assert (small["num_hidden_layers"], small["backbone_out_indices"]) == (4, [0, 1, 2, 3])
    small = smallest(transformers.Data2VecVisionConfig())
    assert (small["num_hidden_layers"], small["out_indices"]) == (4, [1, 2, 3, 4])
    assert "out_indices" not in smallest(transformers.SwinConfig(out_indices=[1, 2, 3, 4]))
    assert smallest(transformers.DPTConfig(), {"backbone_out_indices": [2, 5, 8, 11]}).get(
        "backbone_out_indices"
    ) is None  # fmt: skip


def test_a_series_is_as_long_as_a_few_patches_need() -> None:
    assert smallest(transformers.TimesFm2_5Config())["context_length"] == 1024
    assert "context_length" not in smallest(transformers.TimesFmConfig(context_length=512))


def test_layers_taken_by_name_are_named_anew() -> None:
    names = {"out_features": ["stage3", "stage6", "stage9"]}
    config = transformers.BeitConfig(**names)
    small = transformers.BeitConfig(**(names | smallest(config)))  # as a stored config is changed
    assert (small.num_hidden_layers, small.out_indices) == (3, [0, 1, 2])
    assert small.out_features == ["stem", "stage1", "stage2"]
    assert agreeing(config, smallest(config))["out_features"] is None
    assert not {"out_indices", "out_features"} & smallest(config, names).keys()


def test_a_part_keeps_a_width_that_its_own_heads_divide() -> None:
    config = transformers.VJEPA2Config(pred_hidden_size=384, pred_num_attention_heads=12)
    small = smallest(config)  # 384 in the proportions of 1024 would be 12 for 3 heads, and then 16
    assert (small["num_attention_heads"], small["pred_num_attention_heads"]) == (4, 4)
    assert (small["hidden_size"], small["pred_hidden_size"]) == (32, 32)
    thirds = next(attempts(config, {}, Wanted(heads_divisor=3))).fields
    assert thirds["pred_hidden_size"] % thirds["pred_num_attention_heads"] == 0
    given = {"pred_hidden_size": 12}
    assert not given.keys() & smallest(transformers.VJEPA2Config(**given), given).keys()


def test_channels_in_groups_of_one_stay_so() -> None:
    assert smallest(transformers.MimiConfig())["upsample_groups"] == 32
    assert "upsample_groups" not in smallest(transformers.MimiConfig(upsample_groups=64))


def test_layers_to_take_outputs_of_are_chosen_where_the_config_names_one() -> None:
    config = transformers.BeitConfig()
    filled = [f["out_indices"] for f in completions(config) if "out_indices" in f]
    assert filled and all(indices == [3, 6, 9, 12] for indices in filled)
    small = smallest(transformers.BeitConfig(out_indices=filled[0]))
    assert (small["num_hidden_layers"], small["out_indices"]) == (4, [1, 2, 3, 4])


def test_fields_are_told_by_where_they_are() -> None:
    fields = {"use_cache": False, "text_config": {"model_type": "x", "rope": {"a": 1}}}
    assert flat(fields) == {"use_cache": False, "text_config.rope": {"a": 1}}


def test_heads_by_layer_are_scaled_as_heads_are() -> None:
    config = transformers.Sapiens2Config()
    fields = next(attempts(config, {})).fields
    by_layer = fields["num_key_value_heads_per_layer"]
    heads, old = fields["num_attention_heads"], config.num_attention_heads
    assert old in config.num_key_value_heads_per_layer
    assert heads in by_layer and max(by_layer) <= heads
    assert len(by_layer) == fields["num_hidden_layers"]


def test_layers_to_take_outputs_of_are_layers_of_the_small_model() -> None:
    assert nearer([3, 6, 9, 12], 12, 4) == [1, 2, 3, 4]
    assert nearer([9, 10, 11, 12], 12, 4) == [1, 2, 3, 4]
    assert nearer([2, 11], 12, 4) == [0, 3]


def test_the_text_of_several_is_the_whole() -> None:
    several = transformers.MusicgenConfig()
    assert text_part(several) is several
    one = transformers.LlavaConfig()
    assert text_part(one) is one.text_config


def test_few_layers_have_all_kinds_and_the_models_own_widths() -> None:
    config = transformers.DeepseekV3Config()
    assert next(few_layers(config, {})) == {"num_hidden_layers": 2, "first_k_dense_replace": 1}
    assert next(few_layers(config, {"num_hidden_layers": 4})) == {"first_k_dense_replace": 1}
