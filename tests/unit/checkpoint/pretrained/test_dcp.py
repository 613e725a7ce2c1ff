"""Folders that plain torch.distributed.checkpoint writes and reads, by the model's own names."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import load, save
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from merak.checkpoint.model_files import plan_model_files
from merak.checkpoint.saver import Contents, save_state
from merak.checkpoint.state import RankState
from merak.cli.main import main
from merak.core.mesh import Mesh
from merak.graph.weights.holders import find_holders
from tests.unit.checkpoint.models import gpt2

ALONE = Mesh(1, 1, 1, 0, torch.device("cpu"), None)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def mixtral() -> nn.Module:
    """Whose stacks of experts transformers' files have apart."""
    config = MixtralConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=32, num_local_experts=4, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return MixtralForCausalLM(config)


class Plain(nn.Module):
    """Tied weights and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(8, 4), nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight


def write_checkpoint(folder: Path, model: nn.Module) -> Path:
    names = [name for name, _ in model.named_parameters()]
    files = plan_model_files(model, find_holders(model, names, {}, ALONE), ALONE)
    save_state(folder, RankState(model, None, names, {}, ALONE), Contents(model_files=files))
    return folder


def zeros_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("make", [gpt2, mixtral, Plain])
def test_plain_torch_loads_what_is_exported(make: Any, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model: nn.Module = make()
    checkpoint, out = write_checkpoint(tmp_path / "checkpoint-3", model), tmp_path / "out"
    assert main(["export", str(checkpoint), str(out), "--format", "dcp"]) == 0
    found = zeros_of(model)
    load(found, checkpoint_id=out)
    assert all(torch.equal(found[name], own) for name, own in model.state_dict().items())
    words = ["export", str(checkpoint), str(out), "--format", "dcp", "--dtype", "bfloat16"]
    assert main(words) == 2
    assert main([*words, "--overwrite"]) == 0
    halves = {n: t.bfloat16() if t.is_floating_point() else t for n, t in zeros_of(model).items()}
    load(halves, checkpoint_id=out)
    for name, own in model.state_dict().items():
        torch.testing.assert_close(halves[name], own.to(halves[name].dtype), rtol=0, atol=0)


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("make", [gpt2, mixtral])
def test_what_plain_torch_saves_is_exported_for_from_pretrained(
    make: Any, is_nested: bool, tmp_path: Path
) -> None:
    make().save_pretrained(tmp_path / "base")  # whose weights do not count
    torch.manual_seed(3)
    model = make()
    state = model.state_dict()
    save({"model": state, "step": 7} if is_nested else state, checkpoint_id=tmp_path / "dcp")
    words = ["export", str(tmp_path / "dcp"), str(tmp_path / "out")]
    assert main([*words, "--base", str(tmp_path / "base")]) == 0
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], own) for name, own in state.items())


def test_what_does_not_fit_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    state = gpt2().state_dict()
    wider = {**state, "lm_head.weight": torch.zeros(3, 2)}
    fewer = {name: own for name, own in state.items() if name != "transformer.ln_f.bias"}
    gpt2().save_pretrained(tmp_path / "base")
    checkpoint = write_checkpoint(tmp_path / "checkpoint-3", gpt2())
    based = ["--base", str(tmp_path / "base")]
    for number, (saved, words, said) in enumerate((
        (state, [], "does not name its model; give its folder"),
        (state, [*based, "--merge"], "leave --merge, --average and --format out"),
        (wider, based, "lm_head.weight is of shape (3, 2)"),
        (fewer, based, "has no transformer.ln_f.bias, which the model has"),
    )):  # fmt: skip
        folder = tmp_path / f"dcp{number}"
        save(saved, checkpoint_id=folder)
        assert main(["export", str(folder), out, *words]) == 2
        assert said in capsys.readouterr().err
    for words, said in (
        (["--format", "zip"], "--format zip is none; use pretrained or dcp"),
        (["--format", "dcp", "--max-shard-size", "1GB"], "leave --merge and --max-shard-size out"),
    ):
        assert main(["export", str(checkpoint), out, *words]) == 2
        assert said in capsys.readouterr().err


class Touch:
    """Writes a file where somebody loads it as a pickle."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return Path.touch, (self.place,)


def test_an_index_runs_no_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpt2().save_pretrained(tmp_path / "base")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Touch(tmp_path / "touched")))
    words = ["export", str(tmp_path / "dcp"), str(tmp_path / "out")]
    assert main([*words, "--base", str(tmp_path / "base")]) == 2
    assert "is no part of an index" in capsys.readouterr().err
    assert not (tmp_path / "touched").exists()
