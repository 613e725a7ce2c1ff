"""Models by name, folder and file, with overrides, and what wrong ones are told."""

import json
from pathlib import Path

import pytest
from transformers import BertConfig, CLIPConfig, GPT2Config, GPT2LMHeadModel

from merak.cli.errors import CommandError
from merak.cli.model import parse_overrides, resolve_model

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
    file.unlink()
    with pytest.raises(CommandError, match=r"config\.json cannot be read as JSON"):
        resolve_model(str(tmp_path))


def test_overrides_are_an_object() -> None:
    assert parse_overrides(None) == {}
    assert parse_overrides('{"n_layer": 4}') == {"n_layer": 4}
    with pytest.raises(CommandError, match="is not JSON"):
        parse_overrides("n_layer=4")
    with pytest.raises(CommandError, match="is not a JSON object"):
        parse_overrides("[4]")
