"""Example batches: real models run on them and give a loss."""

import pytest
import torch

from merak.core.errors import CommandError
from merak.zoo.batches.batch import example_arguments, example_columns
from merak.zoo.batches.columns import Column, draw_batch
from merak.zoo.batches.examples import examples
from merak.zoo.model_source import resolve_model
from tests.tiers import one_in

SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
TEXT = {**SMALL, "vocab_size": 31, "max_position_embeddings": 32}
IMAGE = {**SMALL, "image_size": 32, "patch_size": 16}
GPT2 = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 31, "n_positions": 32}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 31}
FILM = {
    "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1,
    "pred_hidden_size": 32, "pred_num_attention_heads": 2, "pred_num_hidden_layers": 1,
}  # fmt: skip
SEGFORMER = {
    "hidden_sizes": [8, 8, 16, 16],
    "depths": [1, 1, 1, 1],
    "decoder_hidden_size": 16,
    "num_attention_heads": [1, 1, 2, 2],
}
SPEECH = {
    "mask_time_prob": 0.0,
    **SMALL,
    "vocab_size": 31,
    "conv_dim": [8, 8],
    "conv_stride": [5, 4],
    "conv_kernel": [10, 8],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}
SPECTRUM = {**SMALL, "max_length": 32, "num_mel_bins": 16, "patch_size": 8}
ENCODED = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "vocab_size": 31,
    "max_source_positions": 16,
    "max_target_positions": 32,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
}

MODELS = [
    ("GPT2LMHeadModel", GPT2, {"input_ids": (2, 8), "labels": (2, 8)}),
    ("LlamaForCausalLM", TEXT, {"input_ids": (2, 8), "labels": (2, 8)}),
    ("BertForMaskedLM", TEXT, {"input_ids": (2, 8), "labels": (2, 8)}),
    (
        "T5ForConditionalGeneration",
        T5,
        {"input_ids": (2, 8), "decoder_input_ids": (2, 8), "labels": (2, 8)},
    ),
    (
        "MT5ForConditionalGeneration",
        {**T5, "decoder_start_token_id": 0},
        {"input_ids": (2, 8), "labels": (2, 8)},
    ),
    ("BertForSequenceClassification", TEXT, {"input_ids": (2, 8), "labels": (2,)}),
    ("BertForTokenClassification", TEXT, {"input_ids": (2, 8), "labels": (2, 8)}),
    ("BertForMultipleChoice", TEXT, {"input_ids": (2, 2, 8), "labels": (2,)}),
    ("BertForNextSentencePrediction", TEXT, {"input_ids": (2, 8), "labels": (2,)}),
    (
        "BertForPreTraining",
        TEXT,
        {"input_ids": (2, 8), "labels": (2, 8), "next_sentence_label": (2,)},
    ),
    (
        "BertForQuestionAnswering",
        TEXT,
        {"input_ids": (2, 8), "start_positions": (2,), "end_positions": (2,)},
    ),
    (
        "LayoutLMForTokenClassification",
        TEXT,
        {"input_ids": (2, 8), "bbox": (2, 8, 4), "labels": (2, 8)},
    ),
    (
        "PerceiverForImageClassificationLearned",
        {"d_latents": 16, "num_latents": 4, "num_self_attends_per_block": 2, "image_size": 32},
        {"pixel_values": (2, 3, 32, 32), "labels": (2,)},
    ),
    ("ViTForImageClassification", IMAGE, {"pixel_values": (2, 3, 32, 32), "labels": (2,)}),
    (
        "ResNetForImageClassification",
        {"hidden_sizes": [8, 8, 8, 8], "embedding_size": 8, "depths": [1, 1, 1, 1]},
        {"pixel_values": (2, 3, 224, 224), "labels": (2,)},
    ),
    (
        "CLIPModel",
        {"text_config": TEXT, "vision_config": {**IMAGE, "patch_size": 32}},
        {"input_ids": (2, 8), "pixel_values": (2, 3, 32, 32)},
    ),
    ("Wav2Vec2ForCTC", SPEECH, {"input_values": (2, 160), "labels": (2, 2)}),
    ("Wav2Vec2ForSequenceClassification", SPEECH, {"input_values": (2, 160), "labels": (2,)}),
    (
        "WhisperForConditionalGeneration",
        {**ENCODED, "num_mel_bins": 8},
        {"input_features": (2, 8, 32), "labels": (2, 8)},
    ),
    ("ASTForAudioClassification", SPECTRUM, {"input_values": (2, 32, 16), "labels": (2,)}),
    (
        "Speech2TextForConditionalGeneration",
        {**ENCODED, "input_feat_per_channel": 8},
        {"input_features": (2, 8, 8), "labels": (2, 8)},
    ),
    (
        "SegformerForSemanticSegmentation",
        SEGFORMER,
        {"pixel_values": (2, 3, 224, 224), "labels": (2, 224, 224)},
    ),
    (
        "VJEPA2ForVideoClassification",
        {**FILM, "crop_size": 32, "in_chans": 2},
        {"pixel_values_videos": (2, 4, 2, 32, 32), "labels": (2,)},
    ),
]


@one_in(5)
@pytest.mark.parametrize(("name", "config", "shapes"), MODELS, ids=[m[0] for m in MODELS])
def test_models_give_a_loss(
    name: str, config: dict[str, object], shapes: dict[str, tuple[int, ...]]
) -> None:
    source = resolve_model(name, config)
    columns = example_columns(source.model_class, source.config, batch=2, sequence=8)
    assert {key: column.shape for key, column in columns.items()} == shapes
    batch = draw_batch(columns, seed=1)
    assert {key: column.meta.dtype for key, column in columns.items()} == {
        key: value.dtype for key, value in batch.items()
    }
    arguments = example_arguments(source.model_class)
    assert torch.isfinite(source.build()(**batch, **arguments).loss)


def test_a_recording_whose_length_a_mask_tells() -> None:
    """The model makes one frame of eight, and more of them than there are labels."""
    encoder = {**SMALL, "num_mel_bins": 8, "subsampling_conv_channels": 8}
    source = resolve_model(
        "ParakeetForCTC", {"vocab_size": 31, "pad_token_id": 30, "encoder_config": encoder}
    )
    plain, *others = examples(source.model_class, source.config, sequence=8)
    assert "attention_mask" not in plain.columns
    columns = others[0].columns
    assert columns["input_features"].shape == (1, 64, 8)
    assert columns["attention_mask"].shape == (1, 64)
    assert torch.isfinite(source.build()(**draw_batch(columns, seed=1)).loss)


def test_sequence_is_the_models_longest() -> None:
    source = resolve_model("GPT2LMHeadModel", {"n_positions": 48})
    assert example_columns(source.model_class, source.config)["input_ids"].shape == (1, 48)
    long = resolve_model("GPT2LMHeadModel", {"n_positions": 4096})
    assert example_columns(long.model_class, long.config)["input_ids"].shape == (1, 512)
    decoder = resolve_model("WhisperForConditionalGeneration", {"max_target_positions": 40})
    assert example_columns(decoder.model_class, decoder.config)["labels"].shape == (1, 40)
    endless = resolve_model("T5ForConditionalGeneration", {})
    assert example_columns(endless.model_class, endless.config)["labels"].shape == (1, 512)


def test_regression_has_a_number_for_a_label() -> None:
    source = resolve_model("BertForSequenceClassification", {"num_labels": 1})
    columns = example_columns(source.model_class, source.config)
    assert columns["labels"].meta.dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "sizes", "said"),
    [
        ("GPT2LMHeadModel", {"batch": 0}, "--batch 0 has no samples"),
        ("GPT2LMHeadModel", {"sequence": 0}, "--seq 0 has no tokens"),
        ("GPT2LMHeadModel", {"sequence": 2000}, "--seq 2000 is more than the model's 1024 posit"),
        (
            "WhisperForConditionalGeneration",
            {"sequence": 500},
            """--seq 448, or --config '{"max_target_positions": 500}'""",
        ),
    ],
)
def test_wrong_sizes(name: str, sizes: dict[str, int], said: str) -> None:
    source = resolve_model(name)
    with pytest.raises(CommandError, match=said):
        example_columns(source.model_class, source.config, **sizes)  # type: ignore[arg-type]


def test_frames_of_sound_need_a_size() -> None:
    source = resolve_model("Speech2TextForConditionalGeneration")
    vars(source.config)["input_feat_per_channel"] = None
    said = "Speech2TextConfig does not say how many numbers a frame of sound has"
    with pytest.raises(CommandError, match=said):
        example_columns(source.model_class, source.config)


def test_a_recording_without_frames_is_a_wave() -> None:
    source = resolve_model("MoonshineForConditionalGeneration")
    columns = example_columns(source.model_class, source.config, batch=2, sequence=8)
    assert columns["input_values"].shape == (2, 7680)


def test_draws_depend_on_the_seed_and_the_column_alone() -> None:
    columns = {"a": Column((64,), 100), "b": Column((64,), 100), "c": Column((64,))}
    first, again, other = (draw_batch(columns, seed=seed) for seed in (1, 1, 2))
    alone = draw_batch({"b": columns["b"]}, seed=1)
    assert all(torch.equal(first[name], again[name]) for name in columns)
    assert torch.equal(alone["b"], first["b"])
    assert not torch.equal(first["a"], first["b"])
    assert not torch.equal(first["a"], other["a"])
    assert int(first["a"].min()) >= 0 and int(first["a"].max()) < 100


def test_a_token_ends_each_part_of_a_row_and_is_nowhere_else() -> None:
    columns = {"ids": Column((5, 11), 40, last=7, times=3)}
    drawn = draw_batch(columns, seed=1)["ids"]
    assert (drawn == 7).nonzero()[:, 1].view(5, 3).tolist() == [[2, 6, 10]] * 5
    assert int(drawn.max()) < 40
