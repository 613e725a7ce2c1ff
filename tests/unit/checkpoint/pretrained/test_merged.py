"""Export of adapters as the whole model that they make of their base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from merak.checkpoint.model_files import plan_model_files
from merak.checkpoint.saver import Contents, save_state
from merak.checkpoint.state import RankState
from merak.cli.main import main
from merak.core.mesh import Mesh
from merak.graph.weights.holders import find_holders
from tests.tiers import slow
from tests.unit.checkpoint.models import gpt2, llama

peft: Any = pytest.importorskip("peft")

ALONE = Mesh(1, 1, 1, 0, torch.device("cpu"), None)
IDS = torch.arange(12).view(2, 6)


def write_checkpoint(folder: Path, model: Any) -> Path:
    """A checkpoint of a model, with a tokenizer's file."""
    names = [name for name, _ in model.named_parameters()]
    files = plan_model_files(model, find_holders(model, names, {}, ALONE), ALONE)

    def others(place: Path) -> None:
        (place / "tokenizer.json").write_text("{}")

    contents = Contents(model_files=files, write_files=others)
    save_state(folder, RankState(model, None, names, {}, ALONE), contents)
    return folder


def adapted(base: Path, **options: Any) -> Any:
    """A model with adapters that change what it computes."""
    config = peft.LoraConfig(
        r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False, **options
    )
    return adapted_of(base, config)


def adapted_of(base: Path, config: Any) -> Any:
    torch.manual_seed(5)
    return peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).eval()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    gpt2().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"modules_to_save": ["ln_f"]}])
def test_the_merged_model_computes_what_the_adapted_one_does(
    base: Path, tmp_path: Path, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    model = adapted(base, **options)
    checkpoint, out = write_checkpoint(tmp_path / "checkpoint-3", model), tmp_path / "out"
    assert main(["export", str(checkpoint), str(out), "--merge", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["files"] == sorted(path.name for path in out.iterdir())
    assert "tokenizer.json" in report["files"] and "model.safetensors" in report["files"]
    assert not any("adapter" in name for name in report["files"])
    found = AutoModelForCausalLM.from_pretrained(out).eval()
    assert report["parameters"] == found.num_parameters()
    expected, plain = model(IDS).logits, AutoModelForCausalLM.from_pretrained(base).eval()(IDS)
    assert not torch.allclose(expected, plain.logits, rtol=1e-3)
    torch.testing.assert_close(found(IDS).logits, expected, rtol=1e-4, atol=1e-5)


LINEARS = {"target_modules": ["q_proj", "down_proj"]}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("IA3Config", LINEARS | {"feedforward_modules": ["down_proj"]}),
        slow("VeraConfig", {"target_modules": ["q_proj"], "r": 4}),
        slow("OFTConfig", LINEARS | {"oft_block_size": 4}),
        slow("BOFTConfig", LINEARS | {"boft_block_size": 4}),
        slow("LoHaConfig", LINEARS | {"r": 2}),
        slow("LoKrConfig", LINEARS | {"r": 2}),
        slow("LoraConfig", {"target_modules": [], "target_parameters": ["q_proj.weight"]}),
    ],
)
@pytest.mark.filterwarnings("ignore:Failed to load the CUDA extension", "ignore:Setting boft")
def test_other_methods_are_merged(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "base")
    model = adapted_of(tmp_path / "base", getattr(peft, kind)(task_type="CAUSAL_LM", **options))
    plain = model(IDS).logits
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    checkpoint, out = write_checkpoint(tmp_path / "checkpoint-3", model), tmp_path / "out"
    assert main(["export", str(checkpoint), str(out), "--merge"]) == 0
    found = AutoModelForCausalLM.from_pretrained(out).eval()(IDS).logits
    assert not torch.allclose(found, plain, rtol=1e-4)
    torch.testing.assert_close(found, model(IDS).logits, rtol=1e-4, atol=1e-5)


def test_the_base_may_have_moved(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint-3", adapted(base))
    moved = base.rename(tmp_path / "elsewhere")
    words = ["export", str(checkpoint), str(tmp_path / "out"), "--merge"]
    assert main(words) == 2
    assert str(base) in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main([*words, "--base", str(moved), "--dtype", "bfloat16"]) == 0
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert found.dtype is torch.bfloat16


def test_prompts_are_refused(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    model.save_pretrained(tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--merge"]) == 2
    said = capsys.readouterr().err
    assert "adapters of kind PROMPT_TUNING change no weights" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore:The following rank_pattern keys")
def test_ranks_of_adalora_are_those_that_were_allocated(base: Path, tmp_path: Path) -> None:
    options = {"target_modules": ["c_attn"], "fan_in_fan_out": True, "total_step": 9}
    model = adapted_of(base, peft.AdaLoraConfig(init_r=4, **options))
    own = "transformer.h.0.attn.c_attn.lora_E"
    model.peft_config["default"].rank_pattern = {own: [True, False, True, False]}
    with torch.no_grad():
        model.get_parameter(f"base_model.model.{own}.default").copy_(
            torch.tensor([9.0, 0.0, 9.0, 0.0]).view(4, 1)
        )
    checkpoint, out = write_checkpoint(tmp_path / "checkpoint-3", model), tmp_path / "out"
    assert main(["export", str(checkpoint), str(out)]) == 0
    assert tuple(load_file(out / "adapter_model.safetensors")[f"base_model.model.{own}"].shape) == (
        2, 1,
    )  # fmt: skip
    assert main(["export", str(out), str(tmp_path / "merged"), "--merge"]) == 0
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(found(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-5)


def test_a_saved_model_is_merged_as_a_checkpoint_is(base: Path, tmp_path: Path) -> None:
    model, folder = adapted(base), tmp_path / "run"
    model.save_pretrained(folder)
    (folder / "checkpoint-2").mkdir()
    (folder / "tokenizer.json").write_text("{}")
    assert main(["export", str(folder), str(tmp_path / "out"), "--merge"]) == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert "tokenizer.json" in names and not {"README.md", "checkpoint-2"} & names
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(found(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_merged_is_refused(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = write_checkpoint(tmp_path / "whole", gpt2())
    checkpoint = write_checkpoint(tmp_path / "checkpoint-3", adapted(base))
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text((base / "config.json").read_text())
    out = str(tmp_path / "out")
    for words, said in (
        ([str(whole), out, "--merge"], "holds a whole model and no adapters; leave --merge out"),
        ([str(checkpoint), out, "--base", str(base)], "is for --merge; add it"),
        ([str(checkpoint), out, "--merge", "--base", str(tmp_path / "bare")], "has no weights"),
    ):
        assert main(["export", *words]) == 2
        assert said in capsys.readouterr().err
    assert not Path(out).exists()
    assert not list(tmp_path.glob(".*"))
