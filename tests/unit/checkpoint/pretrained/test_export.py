"""Export of a checkpoint: the folder of the model, bit for bit, or one sentence and nothing."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from merak.checkpoint.model_files import plan_model_files
from merak.checkpoint.pretrained import export as exporting
from merak.checkpoint.pretrained.export import export_checkpoint
from merak.checkpoint.pretrained.tensor_file import TensorFile
from merak.checkpoint.save_pretrained import save_pretrained
from merak.checkpoint.saver import Contents, save_state
from merak.checkpoint.state import RankState
from merak.core.errors import SavingError, WeightsError
from merak.core.mesh import Mesh
from merak.graph.weights.holders import find_holders
from tests.unit.checkpoint.models import gpt2

ALONE = Mesh(1, 1, 1, 0, torch.device("cpu"), None)
OTHERS = {"tokenizer.json": "{}", "trainer_state.json": "{}", "training_args.json": "{}"}


def write_others(folder: Path) -> None:
    for name, text in OTHERS.items():
        (folder / name).write_text(text)


class Saved(NamedTuple):
    """A checkpoint, and the folder that `save_model` would write of the same model."""

    checkpoint: Path
    expected: Path


def saved(folder: Path, model: nn.Module, size: str | None = None) -> Saved:
    names = [name for name, _ in model.named_parameters()]
    files = plan_model_files(model, find_holders(model, names, {}, ALONE), ALONE, size)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    checkpoint, expected = folder / "runs" / "checkpoint-3", folder / "expected"
    state = RankState(model, optimizer, names, {}, ALONE)
    save_state(checkpoint, state, Contents(model_files=files, write_files=write_others))
    save_pretrained(model, names, {}, ALONE, expected, size)
    (expected / "tokenizer.json").write_text("{}")
    return Saved(checkpoint, expected)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return saved(tmp_path_factory.mktemp("parts"), gpt2(), "60KB")


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_the_folder_is_that_of_the_model(parts: Saved, tmp_path: Path) -> None:
    found = export_checkpoint(parts.checkpoint, tmp_path / "out")
    expected = contents(parts.expected)
    assert contents(tmp_path / "out") == expected
    assert found.files == tuple(sorted(expected))
    assert found.num_bytes == sum(map(len, expected.values()))
    assert found.parameters == sum(p.numel() for p in gpt2().parameters())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_files_of_another_size_are_those_of_transformers(parts: Saved, tmp_path: Path) -> None:
    found = export_checkpoint(parts.checkpoint, tmp_path / "out", max_shard_size=10**9)
    assert "model.safetensors" in found.files
    model = AutoModelForCausalLM.from_pretrained(parts.expected)
    model.save_pretrained(tmp_path / "expected")
    name = "model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "expected" / name).read_bytes()
    again = export_checkpoint(parts.checkpoint, tmp_path / "small", max_shard_size=20_000)
    weights = [load_file(tmp_path / "small" / n) for n in again.files if n.endswith("tensors")]
    whole = load_file(tmp_path / "out" / name)
    assert len(weights) > 5
    assert sum(map(len, weights)) == len(whole)
    assert all(torch.equal(whole[key], t) for file in weights for key, t in file.items())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    index = json.loads((tmp_path / "small" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_parameters"] == found.parameters


@pytest.mark.parametrize("size", [None, 10**9])
def test_another_type_is_in_tensors_and_config(
    parts: Saved, tmp_path: Path, size: int | None
) -> None:
    export_checkpoint(parts.checkpoint, tmp_path / "out", max_shard_size=size, dtype=torch.bfloat16)
    expected = AutoModelForCausalLM.from_pretrained(parts.expected, dtype=torch.bfloat16)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert found.dtype == torch.bfloat16
    for name, value in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name


def test_adapters_and_what_stands_beside_them(tmp_path: Path) -> None:
    peft: Any = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    checkpoint, expected = saved(tmp_path, peft.get_peft_model(gpt2(), config))
    export_checkpoint(checkpoint, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(expected)
    assert peft.PeftModel.from_pretrained(gpt2(), tmp_path / "out")
    export_checkpoint(checkpoint, tmp_path / "low", dtype=torch.float16)
    low = load_file(tmp_path / "low" / "adapter_model.safetensors")
    for key, value in load_file(expected / "adapter_model.safetensors").items():
        assert torch.equal(low[key], value.half())


def test_a_folder_that_is_not_empty_is_left_alone(parts: Saved, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    export_checkpoint(parts.checkpoint, out)
    (out / "mine.txt").write_text("mine")
    before = contents(out)
    with pytest.raises(WeightsError, match=r"out is there already and is not empty.*--overwrite"):
        export_checkpoint(parts.checkpoint, out, max_shard_size=10**9)
    assert contents(out) == before
    export_checkpoint(parts.checkpoint, out, max_shard_size=10**9, overwrite=True)
    names = {"mine.txt", "model.safetensors", "config.json", "generation_config.json"}
    assert contents(out).keys() == names | {"tokenizer.json"}


def damaged(parts: Saved, tmp_path: Path) -> Path:
    copy = tmp_path / "checkpoint-3"
    shutil.copytree(parts.checkpoint, copy)
    return copy


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped": (lambda c: flip(next(iter(sorted(c.glob("model-00002*")))), -9), "another checksum"),
    "header": (lambda c: flip(next(iter(sorted(c.glob("model-00002*")))), 12), "another checksum"),
    "missing": (lambda c: (c / "config.json").unlink(), r"config\.json is missing"),
    "cut": (lambda c: os.truncate(c / "tokenizer.json", 1), r"tokenizer\.json has 1 bytes"),
    "link": (lambda c: link(c / "tokenizer.json"), r"tokenizer\.json is missing"),
    "manifest": (lambda c: flip(c / "manifest.json", 40), "no valid checkpoint"),
    "none": (lambda c: (c / "manifest.json").unlink(), "is no checkpoint of Merak"),
}


def link(path: Path) -> None:
    path.rename(path.parent.with_suffix(".elsewhere"))
    path.symlink_to(path.parent.with_suffix(".elsewhere"))


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_and_nothing_is_written(parts: Saved, tmp_path: Path, kind: str) -> None:
    checkpoint = damaged(parts, tmp_path)
    harm, message = DAMAGE[kind]
    harm(checkpoint)
    with pytest.raises(WeightsError, match=message):
        export_checkpoint(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*"))


def test_damage_of_what_is_not_exported_does_not_matter(parts: Saved, tmp_path: Path) -> None:
    checkpoint = damaged(parts, tmp_path)
    flip(next(checkpoint.glob("rank-*.safetensors")), -1)
    export_checkpoint(checkpoint, tmp_path / "out")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("checkpoint-3/out", r"out is inside the checkpoint"),
        ("checkpoint-3", r"checkpoint-3 is inside the checkpoint"),
        ("link/out", r"out is inside the checkpoint"),
        ("file", r"file is a file; name a folder"),
    ],
)
def test_a_target_that_cannot_be_is_refused(
    parts: Saved, tmp_path: Path, target: str, message: str
) -> None:
    checkpoint = damaged(parts, tmp_path)
    (tmp_path / "link").symlink_to(checkpoint)
    (tmp_path / "file").write_text("")
    before = contents(checkpoint)
    with pytest.raises(WeightsError, match=message):
        export_checkpoint(checkpoint, tmp_path / target, overwrite=True)
    assert contents(checkpoint) == before


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="checkpoint-9 is no folder; name a checkpoint"):
        export_checkpoint(tmp_path / "checkpoint-9", tmp_path / "out")


def test_too_little_room_is_found_beforehand(
    parts: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(exporting.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(SavingError, match=r"out needs [\d.]+ MB, and 0\.0 MB are free there"):
        export_checkpoint(parts.checkpoint, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [None, 60_000])
def test_a_disk_that_fills_up_leaves_nothing(
    parts: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int | None
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting.shutil, "copyfileobj", full)
    monkeypatch.setattr(TensorFile, "close", full)
    with pytest.raises(SavingError, match="out could not be written: No space left on device"):
        export_checkpoint(parts.checkpoint, tmp_path / "out", max_shard_size=size)
    assert list(tmp_path.iterdir()) == []


def earlier(parts: Saved, tmp_path: Path) -> Path:
    """A checkpoint of the format before the manifest, with a pickle that must not be read."""
    checkpoint = damaged(parts, tmp_path)
    (checkpoint / "manifest.json").unlink()
    for path in checkpoint.glob("rank-*"):
        path.unlink()
    (checkpoint / "merak").mkdir()
    harm = partial(os.mkdir, str(tmp_path / "harm"))
    (checkpoint / "merak" / ".metadata").write_bytes(_malicious(harm))
    (checkpoint / "scheduler.pt").write_bytes(_malicious(harm))
    return checkpoint


def _malicious(harm: partial[None]) -> bytes:
    import pickle

    class Harm:
        def __reduce__(self) -> tuple[Any, ...]:
            return harm.func, harm.args

    return pickle.dumps(Harm())


def test_an_earlier_checkpoint_is_exported_without_its_pickles(
    parts: Saved, tmp_path: Path
) -> None:
    export_checkpoint(earlier(parts, tmp_path), tmp_path / "out")
    assert contents(tmp_path / "out") == contents(parts.expected)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("model-00002-of-*", lambda data: data[:-5], "model-00002-of-.* has [0-9,]+ bytes of"),
        ("model-00003-of-*", lambda data: None, "model-00003-of-.* is missing"),
        ("*.index.json", lambda data: data[:-5], "index.json cannot be read"),
        (
            "*.index.json",
            lambda data: data.replace(b"model-00001", b"../../secret"),
            "secret-of-.* is missing",
        ),
    ],
)
def test_damage_without_checksums(
    parts: Saved,
    tmp_path: Path,
    name: str,
    change: Callable[[bytes], bytes | None],
    message: str,
) -> None:
    checkpoint = earlier(parts, tmp_path)
    (path,) = checkpoint.glob(name)
    after = change(path.read_bytes())
    path.unlink() if after is None else path.write_bytes(after)
    with pytest.raises(WeightsError, match=message):
        export_checkpoint(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


MEMORY = """
import resource, sys
from pathlib import Path
from merak.checkpoint.pretrained.export import export_checkpoint
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024
before = peak()
export_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]), max_shard_size=eval(sys.argv[3]))
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
@pytest.mark.parametrize("size", ["None", "40_000_000"])
def test_memory_is_that_of_one_tensor(tmp_path: Path, size: str) -> None:
    model = nn.Sequential(*(nn.Linear(1500, 1500, bias=False) for _ in range(24)))  # 9 MB each
    checkpoint, _ = saved(tmp_path, model)
    words = [sys.executable, "-c", MEMORY, str(checkpoint), str(tmp_path / "out"), size]
    done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=300)
    whole = sum(math.prod(p.shape) * 4 for p in model.parameters())
    assert int(done.stdout) < 0.3 * whole  # chunks of 16 MiB of two libraries, and one tensor
