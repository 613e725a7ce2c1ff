"""Models by name, folder and file, with overrides, and what wrong ones are told."""

import json
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, CLIPConfig, GPT2Config, GPT2LMHeadModel

from merak.core.errors import CommandError
from merak.zoo.model_source import parse_overrides, resolve_model

TINY = {"n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 11, "n_positions": 16}


def test_class_name_with_overrides() -> None:
    source = resolve_model("GPT2LMHeadModel", TINY)
    assert (source.name, source.config.n_layer, source.weights) == ("GPT2LMHeadModel", 2, None)
    assert source.config.resid_pdrop == GPT2Config().resid_pdrop
    assert isinstance(source.build(), GPT2LMHeadModel)


def test_field_by_its_general_name() -> None:
    assert resolve_model("GPT2LMHeadModel", {"num_hidden_layers": 3}).config.n_layer == 3


def test_folder_and_file(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(**TINY)).save_pretrained(tmp_path)  # type: ignore[arg-type]
    folder = resolve_model(str(tmp_path), {"attn_pdrop": 0.0})
    assert (folder.name, folder.weights) == ("GPT2LMHeadModel", tmp_path)
    assert (folder.config.vocab_size, folder.config.attn_pdrop) == (11, 0.0)
    file = resolve_model(str(tmp_path / "config.json"))
    assert (file.config.n_embd, file.weights) == (8, None)


def test_nested_override_keeps_the_rest(tmp_path: Path) -> None:
    stored = CLIPConfig().to_dict() | {"architectures": ["CLIPModel"]}
    stored["text_config"] |= {"hidden_size": 64, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(stored), encoding="utf-8")
    config = resolve_model(str(tmp_path), {"text_config": {"num_hidden_layers": 3}}).config
    assert (config.text_config.num_hidden_layers, config.text_config.hidden_size) == (3, 64)


@pytest.mark.parametrize(
    ("model", "overrides", "said"),
    [
        ("GPT2LMHead", {}, "'GPT2LMHead' is neither .* did you mean GPT2LMHeadModel"),
        ("AutoModel", {}, "'AutoModel' is neither a file or folder nor a transformers arch"),
        ("no/such/folder", {}, "'no/such/folder' is neither a file or folder"),
        (
            "GPT2LMHeadModel",
            {"n_layers": 4},
            "GPT2Config has no field 'n_layers'; did you mean n_l",
        ),
        ("GPT2LMHeadModel", {"to_dict": 4}, "GPT2Config has no field 'to_dict'"),
        ("GPT2LMHeadModel", {"n_layer": "x"}, "GPT2Config refuses these fields: .*n_layer"),
    ],
)
def test_wrong_names(model: str, overrides: dict[str, object], said: str) -> None:
    with pytest.raises(CommandError, match=said):
        resolve_model(model, overrides)


def test_config_that_does_not_build() -> None:
    source = resolve_model("GPT2LMHeadModel", {**TINY, "n_head": 3})
    with pytest.raises(
        CommandError, match=r"GPT2LMHeadModel cannot be built .*embed_dim.*--config"
    ):
        source.build()


def test_files_without_a_model(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("[1]", encoding="utf-8")
    with pytest.raises(CommandError, match="holds a list, not a JSON object"):
        resolve_model(str(tmp_path))
    file.write_text('{"model_type": "gpt3"}', encoding="utf-8")
    with pytest.raises(CommandError, match="model_type 'gpt3', which transformers lacks; did you"):
        resolve_model(str(tmp_path))
    file.write_text(json.dumps(BertConfig().to_dict()), encoding="utf-8")
    with pytest.raises(CommandError, match="does not say which model it is for; add"):
        resolve_model(str(tmp_path))
    file.write_text("{nope", encoding="utf-8")
    with pytest.raises(CommandError, match=r"config\.json is not JSON \(Expecting"):
        resolve_model(str(tmp_path))
    file.unlink()
    with pytest.raises(CommandError, match=r"has no config\.json; give a folder that save_pretra"):
        resolve_model(str(tmp_path))


def test_models_inside_are_of_the_type_of_the_whole(tmp_path: Path) -> None:
    text = {"model_type": "llama", "dtype": "float16", "num_hidden_layers": 1, "hidden_size": 32}
    stored = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps({**stored, "text_config": text}), "utf-8")
    with torch.device("meta"):
        model = resolve_model(str(tmp_path)).build()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_what_layers_have_of_their_own_is_replaced_as_a_whole() -> None:
    own = {"per_layer_config": {"1": {"head_dim": 64}}}
    config = resolve_model("Gemma4ForCausalLM", {"num_hidden_layers": 2, **own}).config
    assert [layer.head_dim for layer in config.per_layer_config] == [256, 64]


def test_overrides_are_an_object() -> None:
    assert parse_overrides(None) == {}
    assert parse_overrides('{"n_layer": 4}') == {"n_layer": 4}
    with pytest.raises(CommandError, match="is not JSON"):
        parse_overrides("n_layer=4")
    with pytest.raises(CommandError, match="is not a JSON object"):
        parse_overrides("[4]")


def test_a_config_inside_keeps_what_its_owner_sets_in_it() -> None:
    """Its own class has other defaults: it gives images, and the outputs of one layer alone."""
    plain = resolve_model("Tipsv2DptForSemanticSegmentation").config.backbone_config
    fields = {"backbone_config": {"model_type": plain.model_type, "hidden_size": 128}}
    changed = resolve_model("Tipsv2DptForSemanticSegmentation", fields).config.backbone_config
    assert changed.hidden_size == 128 != plain.hidden_size
    assert changed.reshape_hidden_states == plain.reshape_hidden_states is False
    assert changed.out_indices == plain.out_indices and len(plain.out_indices) == 4


def test_a_stored_config_inside_wins_over_its_owners_defaults(tmp_path: Path) -> None:
    config = resolve_model("Tipsv2DptForSemanticSegmentation").config
    stored = config.to_dict() | {"architectures": ["Tipsv2DptForSemanticSegmentation"]}
    stored["backbone_config"] |= {"reshape_hidden_states": True}
    (tmp_path / "config.json").write_text(json.dumps(stored), encoding="utf-8")
    fields = {"backbone_config": {"model_type": "tipsv2_vision_model", "hidden_size": 128}}
    changed = resolve_model(str(tmp_path), fields).config.backbone_config
    assert changed.reshape_hidden_states is True
    assert changed.hidden_size == 128


def test_fields_that_a_model_lacks_may_be_set_all_the_same() -> None:
    fields = {"num_key_value_heads": 4}
    with pytest.raises(CommandError, match="has no field 'num_key_value_heads'"):
        resolve_model("MoonshineStreamingForConditionalGeneration", fields)
    missing_field = resolve_model(
        "MoonshineStreamingForConditionalGeneration", fields, missing_field=["num_key_value_heads"]
    )
    assert missing_field.config.num_key_value_heads == 4


def test_defaults_that_do_not_fit_together_may_be_mended() -> None:
    """The class's own defaults are refused by the class."""
    name = "Gemma4AssistantForCausalLM"
    with pytest.raises(CommandError, match="hidden_size_per_layer_input must be 0, got 256"):
        resolve_model(name)
    text = {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0}
    text |= {"vocab_size_per_layer_input": 0}
    assert resolve_model(name, {"text_config": text}).config.text_config.hidden_size > 0
