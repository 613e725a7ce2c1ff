"""Weights from a pretrained folder: what `from_pretrained` reads, and nothing else."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertForSequenceClassification,
    GPT2LMHeadModel,
    GPT2Model,
    MixtralConfig,
    MixtralForCausalLM,
    T5ForConditionalGeneration,
)

from merak.core.errors import WeightsError
from merak.core.shards import ParameterShard, take
from merak.graph.weights import pretrained
from merak.graph.weights.empty_weights import empty_weights
from merak.graph.weights.materialize import materialize
from tests.tiers import one_in
from tests.unit.checkpoint.models import PRETRAINED, bert, gpt2, t5

CPU = torch.device("cpu")
families = pytest.mark.parametrize("build", PRETRAINED.values(), ids=PRETRAINED.keys())


def streamed(load: Callable[[], nn.Module], **kwargs: Any) -> nn.Module:
    """What `load` gives, its weights read afterwards."""
    with empty_weights():
        model = load()
    assert all(parameter.is_meta for parameter in model.parameters())
    names = [name for name, _ in model.named_parameters()]
    options = {"device": CPU, "seed": 0, "shards": {}, "shard_index": 0} | kwargs
    materialize(model, names, **options)
    return model


def assert_same(ours: nn.Module, expected: nn.Module) -> None:
    """Equal names, values, dtypes, tying, buffers, mode and config."""
    assert type(ours) is type(expected)
    ours_state, expected_state = ours.state_dict(), expected.state_dict()
    assert list(ours_state) == list(expected_state)
    for name, value in expected_state.items():
        assert ours_state[name].dtype == value.dtype, name
        assert torch.equal(ours_state[name], value), name
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in expected.named_parameters()]
    for (name, one), (_, two) in zip(ours.named_buffers(), expected.named_buffers(), strict=True):
        assert torch.equal(one, two), name
    assert ours.training == expected.training
    assert ours.config.to_dict() == expected.config.to_dict()


@families
@one_in(4)
@pytest.mark.parametrize("max_shard_size", ["1GB", "60KB"])
def test_equals_from_pretrained(
    build: Callable[[], nn.Module], max_shard_size: str, tmp_path: Path
) -> None:
    saved = build()
    saved.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    several = (tmp_path / "model.safetensors.index.json").exists()
    assert several == (max_shard_size == "60KB")
    load = type(saved).from_pretrained
    assert_same(streamed(lambda: load(tmp_path)), load(tmp_path))


@families
def test_auto_model_takes_the_prefix_off(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    build().save_pretrained(tmp_path)
    ours = streamed(lambda: AutoModel.from_pretrained(tmp_path))
    expected = AutoModel.from_pretrained(tmp_path)
    for model in (ours, expected):  # the model saved has none: new in both, so drawn differently
        model.pooler = None
    assert_same(ours, expected)


def test_a_base_model_gets_its_prefix_and_the_new_head_is_initialised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bert().bert.save_pretrained(tmp_path)
    load = BertForSequenceClassification.from_pretrained
    with caplog.at_level(logging.WARNING, "merak"):
        ours = streamed(lambda: load(tmp_path))
    assert "classifier.weight" in caplog.text
    expected = load(tmp_path)
    assert torch.equal(
        ours.bert.encoder.layer[1].output.dense.weight,
        expected.bert.encoder.layer[1].output.dense.weight,
    )
    assert abs(ours.classifier.weight.std() - 0.02) < 0.006
    assert not ours.classifier.bias.any()


def test_a_dtype_is_kept_and_fp32_where_the_model_wants_it(tmp_path: Path) -> None:
    t5().save_pretrained(tmp_path)
    load = T5ForConditionalGeneration.from_pretrained
    ours = streamed(lambda: load(tmp_path, dtype=torch.float16))
    assert ours.encoder.block[0].layer[1].DenseReluDense.wo.weight.dtype == torch.float32
    assert_same(ours, load(tmp_path, dtype=torch.float16))


def test_experts_are_merged_as_transformers_does(tmp_path: Path) -> None:
    config = MixtralConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=3,
        vocab_size=100,
    )
    MixtralForCausalLM(config).save_pretrained(tmp_path, max_shard_size="20KB")
    assert any(".experts.0.w1." in entry.key for entry in pretrained.read_headers(files(tmp_path)))
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same(streamed(lambda: AutoModelForCausalLM.from_pretrained(tmp_path)), expected)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    shard = ParameterShard(dim=1, parts=(48, 48), degree=2)
    ours = streamed(
        lambda: AutoModelForCausalLM.from_pretrained(tmp_path), shards={name: shard}, shard_index=1
    )
    whole = expected.get_parameter(name).data
    assert torch.equal(ours.get_parameter(name), take(whole, shard, 1))


def files(folder: Path) -> list[str]:
    return [str(path) for path in sorted(folder.glob("*.safetensors"))]


def test_only_the_numbers_a_rank_holds_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = gpt2()
    saved.save_pretrained(tmp_path)
    read: list[tuple[str, tuple[int, ...]]] = []
    original = pretrained.CheckpointTensor.read

    def counting(self: pretrained.CheckpointTensor, *args: Any) -> torch.Tensor:
        tensor = original(self, *args)
        read.append((self.name, tuple(tensor.shape)))
        return tensor

    monkeypatch.setattr(pretrained.CheckpointTensor, "read", counting)
    with empty_weights():
        model = GPT2LMHeadModel.from_pretrained(tmp_path)
    assert read == []
    fused, bias = (f"transformer.h.1.attn.c_attn.{kind}" for kind in ("weight", "bias"))
    shards = {fused: ParameterShard(1, (64, 64, 64), 4)}
    materialize(model, [fused, bias], device=CPU, seed=0, shards=shards, shard_index=2)
    assert sorted(read) == [(bias, (192,)), (fused, (64, 48))]
    expected = take(saved.get_parameter(fused).data, shards[fused], 2)
    assert torch.equal(model.get_parameter(fused), expected)


def test_what_is_done_after_loading_counts(tmp_path: Path) -> None:
    def load() -> nn.Module:
        model = GPT2LMHeadModel.from_pretrained(tmp_path)
        model.resize_token_embeddings(203, mean_resizing=False)
        model.transformer.ln_f.weight.data.mul_(2)
        model.extra = nn.Linear(2, 2)
        return model

    saved = gpt2()
    nn.init.normal_(saved.transformer.ln_f.weight)
    saved.save_pretrained(tmp_path)
    ours = streamed(load)
    assert ours.lm_head.weight is ours.transformer.wte.weight
    assert torch.equal(ours.lm_head.weight[:200], saved.lm_head.weight)
    assert abs(ours.lm_head.weight[200:].std() - 0.02) < 0.006
    assert torch.equal(ours.transformer.ln_f.weight, saved.transformer.ln_f.weight * 2)
    assert ours.extra.weight.abs().max() < 1


def test_a_pretrained_part_of_a_plain_model(tmp_path: Path) -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = GPT2Model.from_pretrained(tmp_path)
            self.head = nn.Linear(64, 3)

    saved = gpt2()
    saved.save_pretrained(tmp_path)
    ours = streamed(Whole)
    assert torch.equal(ours.body.h[1].mlp.c_fc.weight, saved.transformer.h[1].mlp.c_fc.weight)
    assert ours.head.weight.std() > 0


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_checkpoint_with_both_of_two_tied_names(tmp_path: Path, offset: float) -> None:
    gpt2().save_pretrained(tmp_path)

    def add_head(state: dict[str, torch.Tensor]) -> None:
        state["lm_head.weight"] = state["transformer.wte.weight"] + offset

    rewrite(tmp_path, add_head)
    load = GPT2LMHeadModel.from_pretrained
    ours, expected = streamed(lambda: load(tmp_path)), load(tmp_path)
    assert_same(ours, expected)
    assert (ours.lm_head.weight is ours.transformer.wte.weight) == (offset == 0.0)


def test_a_missing_parameter_is_initialised_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gpt2().save_pretrained(tmp_path)
    name = "transformer.h.1.mlp.c_fc.weight"
    rewrite(tmp_path, lambda state: state.pop(name))
    with caplog.at_level(logging.WARNING, "merak"):
        ours = streamed(lambda: GPT2LMHeadModel.from_pretrained(tmp_path))
    assert "mlp.c_fc.weight" in caplog.text
    assert abs(ours.get_parameter(name).std() - 0.02) < 0.002


def test_another_shape_is_refused_or_initialised(tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path)
    name = "transformer.wpe.weight"
    load = GPT2LMHeadModel.from_pretrained
    message = r"wpe.weight has shape \(64, 64\) in the checkpoint and \(128, 64\) in the model"
    with pytest.raises(WeightsError, match=message), empty_weights():
        load(tmp_path, n_positions=128)
    ours = streamed(lambda: load(tmp_path, n_positions=128, ignore_mismatched_sizes=True))
    assert ours.get_parameter(name).shape == (128, 64)
    assert abs(ours.get_parameter(name).std() - 0.02) < 0.002


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_map": "auto"}, "device_map="),
        ({"use_safetensors": False}, "is not a safetensors file"),
    ],
)
def test_what_cannot_be_streamed_is_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    model = gpt2()
    model.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=message), empty_weights():
        GPT2LMHeadModel.from_pretrained(tmp_path, **options)


def test_a_conversion_that_needs_numbers_is_refused_by_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import core_model_loading

    class NeedsNumbers(core_model_loading.ConversionOps):
        def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
            return {key: value for key, value in input_dict.items() if value[0].sum() > 0}

    converter = core_model_loading.WeightConverter("c_fc.weight", "c_fc.weight", [NeedsNumbers()])
    gpt2().save_pretrained(tmp_path)
    monkeypatch.setattr(
        "transformers.modeling_utils.get_model_conversion_mapping", lambda *args: [converter]
    )
    message = r"transformer.h.0.mlp.c_fc.weight of .*save_original_format=False"
    with pytest.raises(WeightsError, match=message), empty_weights():
        GPT2LMHeadModel.from_pretrained(tmp_path)


def test_outside_from_pretrained_reads_weights(tmp_path: Path) -> None:
    saved = gpt2()
    saved.save_pretrained(tmp_path)
    with empty_weights():
        GPT2LMHeadModel.from_pretrained(tmp_path)
    model = GPT2LMHeadModel.from_pretrained(tmp_path)
    assert torch.equal(model.lm_head.weight, saved.lm_head.weight)
