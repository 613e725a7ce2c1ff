"""Saving in one process: the folder that transformers itself would write, or none."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.utils import logging as bars

from merak.checkpoint.pretrained.tensor_file import TensorFile
from merak.checkpoint.save_pretrained import save_pretrained
from merak.checkpoint.saver import save_state
from merak.checkpoint.state import RankState
from merak.core.errors import WeightsError
from merak.core.mesh import Mesh
from merak.graph.weights.empty_weights import empty_weights
from merak.graph.weights.materialize import materialize
from tests.tiers import one_in
from tests.unit.checkpoint.models import PRETRAINED, Plain, gpt2

CPU = torch.device("cpu")
ALONE = Mesh(1, 1, 1, 0, CPU, None)
families = pytest.mark.parametrize("build", PRETRAINED.values(), ids=PRETRAINED.keys())


def names_of(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


def assert_same_folder(ours: Path, expected: Path) -> None:
    assert {p.name for p in ours.iterdir()} == {p.name for p in expected.iterdir()}
    for path in expected.iterdir():
        if path.suffix == ".safetensors":
            one, two = load_file(ours / path.name), load_file(path)
            assert list(one) == list(two)
            assert all(torch.equal(one[key], two[key]) for key in two)
        else:
            assert json.loads((ours / path.name).read_text()) == json.loads(path.read_text())


@families
@one_in(4)
@pytest.mark.parametrize("max_shard_size", ["1GB", "60KB"])
def test_the_folder_is_that_of_transformers(
    build: Callable[[], nn.Module], max_shard_size: str, tmp_path: Path
) -> None:
    model = build()
    model.save_pretrained(tmp_path / "expected", max_shard_size=max_shard_size)
    save_pretrained(model, names_of(model), {}, ALONE, tmp_path / "ours", max_shard_size)
    assert_same_folder(tmp_path / "ours", tmp_path / "expected")


def mixtral() -> nn.Module:
    return MixtralForCausalLM(
        MixtralConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=3,
            vocab_size=100,
        )
    )


def test_merged_experts_are_taken_apart_again(tmp_path: Path) -> None:
    model = mixtral()
    model.save_pretrained(tmp_path / "expected")
    save_pretrained(model, names_of(model), {}, ALONE, tmp_path / "whole")
    assert_same_folder(tmp_path / "whole", tmp_path / "expected")
    save_pretrained(model, names_of(model), {}, ALONE, tmp_path / "parts", "10KB")
    expected = load_file(tmp_path / "expected" / "model.safetensors")
    files = [load_file(path) for path in (tmp_path / "parts").glob("*.safetensors")]
    assert sum(map(len, files)) == len(expected)
    assert all(torch.equal(t, expected[key]) for file in files for key, t in file.items())
    assert all(len(file) == 1 or sum(t.nbytes for t in file.values()) <= 10**4 for file in files)


def test_a_model_loaded_without_weights_is_saved_as_it_was(tmp_path: Path) -> None:
    mixtral().save_pretrained(tmp_path / "first")
    with empty_weights():
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    names = names_of(model)
    materialize(model, names, device=CPU, seed=0, shards={}, shard_index=0)
    save_pretrained(model, names, {}, ALONE, tmp_path / "second")
    one, two = (load_file(tmp_path / f / "model.safetensors") for f in ("first", "second"))
    assert list(one) == list(two)
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_a_plain_module_gives_its_state_dict(tmp_path: Path) -> None:
    model = Plain()
    model.norm.running_mean.normal_()
    save_pretrained(model, names_of(model), {}, ALONE, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    other = Plain()
    other.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    for (name, one), (_, two) in zip(model.state_dict().items(), other.state_dict().items()):
        assert torch.equal(one, two), name


def test_a_folder_that_is_there_keeps_its_other_files(tmp_path: Path) -> None:
    model = gpt2()
    save_pretrained(model, names_of(model), {}, ALONE, tmp_path, "60KB")
    (tmp_path / "tokenizer.json").write_text("{}")
    save_pretrained(model, names_of(model), {}, ALONE, tmp_path)
    names = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert torch.equal(
        AutoModelForCausalLM.from_pretrained(tmp_path).lm_head.weight, model.lm_head.weight
    )


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
@one_in(2)
@pytest.mark.parametrize("max_shard_size", ["1GB", "60KB"])
def test_every_file_has_the_mode_that_the_umask_gives(
    tmp_path: Path, umask: int, mode: int, max_shard_size: str
) -> None:
    model = gpt2()
    before = os.umask(umask)
    try:
        for _ in range(2):  # a new folder, and one that is there
            save_pretrained(model, names_of(model), {}, ALONE, tmp_path / "out", max_shard_size)
        save_state(tmp_path / "out" / "ranks", RankState(model, None, names_of(model), {}, ALONE))
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert len(files) >= 5
    assert {oct(path.stat().st_mode & 0o777) for path in files} == {oct(mode)}


def test_a_write_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = gpt2()
    folder = tmp_path / "out"
    save_pretrained(model, names_of(model), {}, ALONE, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    original, written = TensorFile.close, []

    def fail_on_second(file: TensorFile) -> None:
        written.append(file)
        if len(written) == 2:
            raise OSError("No space left on device")
        original(file)

    monkeypatch.setattr(TensorFile, "close", fail_on_second)
    nn.init.zeros_(model.lm_head.weight)
    with pytest.raises(WeightsError, match=r"could not be saved in .*No space left"):
        save_pretrained(model, names_of(model), {}, ALONE, folder, "60KB")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_no_bar_of_no_weights_is_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = gpt2()
    bars.enable_progress_bar()
    save_pretrained(model, names_of(model), {}, ALONE, tmp_path / "out")
    assert capfd.readouterr().err == ""
    assert bars.is_progress_bar_enabled()


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    model = nn.Linear(2, 2)
    with pytest.raises(WeightsError, match=r"out is a file"):
        save_pretrained(model, names_of(model), {}, ALONE, tmp_path / "out")


def test_a_parameter_that_no_rank_holds_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="No rank holds bias"):
        save_pretrained(nn.Linear(2, 2), ["weight"], {}, ALONE, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_state_that_is_no_tensor_is_named(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"steps": 3}

    model = Counting(2, 2)
    with pytest.raises(WeightsError, match="_extra_state of the state dict is neither"):
        save_pretrained(model, names_of(model), {}, ALONE, tmp_path / "out")
