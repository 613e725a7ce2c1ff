"""Files that Merak reads run no code, and lead to no place outside of their folder."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import TrainerState

import merak
from merak.checkpoint.manifest import MANIFEST, Manifest, StoredFile, read_manifest
from merak.cli.main import main
from merak.cli.recipe.recipe import read_recipe
from merak.core import mesh
from merak.core.errors import MerakError
from merak.graph.cache.cache import cached
from merak.plan.cost import device
from merak.plan.cost.measured_times import load_times
from merak.schedule import serialize
from merak.trainer.checkpoints.resuming import checkpoint_to_resume


class Touch:
    """Writes a file where somebody loads it as a pickle."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    """A file that only code of an attacker would make."""
    path = tmp_path / "the code has run"
    yield path
    assert not path.exists()


@pytest.fixture
def one_rank() -> Iterator[None]:
    mesh.reset()
    merak.init(device="cpu")
    yield
    mesh.reset()


def pickled(marker: Path) -> bytes:
    return pickle.dumps(Touch(marker))


def read_features(path: Path) -> object:
    mesh.reset()
    merak.init(device="cpu")
    try:
        folder = str(path.parent / "out")
        return merak.MerakArguments(output_dir=folder, feature_dict=str(path))
    finally:
        mesh.reset()


def read_cached(path: Path) -> object:
    folder = path.parent
    path.rename(folder / "key.graph")

    def make() -> Any:
        raise MerakError("it is made anew")

    return cached(folder, "key", make)


READERS: dict[str, Callable[[Path], object]] = {
    "recipe.yaml": read_recipe,
    "features.json": read_features,
    "schedule.json": serialize.load,
    "schedule.txt": serialize.load,
    "times.json": lambda path: load_times(path, ["a"]),
    "device.json": lambda path: device.from_json(path.read_text("latin-1"), str(path)),
    "trace.graph": read_cached,
}


def contents(marker: Path) -> dict[str, bytes]:
    touch = f"!!python/object/apply:os.system ['touch \"{marker}\"']\n".encode()
    return {
        "a pickle": pickled(marker),
        "a text pickle": pickle.dumps(Touch(marker), protocol=0),
        "YAML's objects": touch,
        "JSON around a pickle": json.dumps({"py/reduce": pickled(marker).hex()}).encode(),
        "a pickle in torch's zip": torch_saved(marker),
    }


def torch_saved(marker: Path) -> bytes:
    file = marker.parent / "saved"
    torch.save(Touch(marker), file)
    return file.read_bytes()


@pytest.mark.parametrize("name", READERS)
def test_files_are_parsed_without_running_code(name: str, tmp_path: Path, marker: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir(mode=0o700)
    for kind, content in contents(marker).items():
        path = folder / name
        path.write_bytes(content)
        with pytest.raises(MerakError) as caught:
            READERS[name](path)
        for line in str(caught.value).split("\n"):  # each names the file, or is all there is
            assert str(path) in line or line == str(caught.value), kind
        assert not marker.exists(), kind


def test_a_recipe_reads_no_files_outside_of_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "secret.txt").write_text("a secret " * 1000, encoding="utf-8")
    for pattern in ("../*.txt", "**/../*.txt", f"{tmp_path}/*.txt"):
        recipe = {
            "model": {"name": "GPT2LMHeadModel"},
            "data": {"source": str(tmp_path / "texts"), "files": pattern},
            "arguments": {"output_dir": str(tmp_path / "out"), "max_steps": 1},
        }
        path = tmp_path / "recipe.yaml"
        path.write_text(json.dumps(recipe), encoding="utf-8")
        assert main(["train", str(path), "--device", "cpu"]) == 2
        assert f"data.files={pattern!r}" in capsys.readouterr().err


def test_a_tokenizer_runs_no_code_of_its_folder(
    tmp_path: Path,
    marker: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    own = {"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}
    (folder / "tokenizer_config.json").write_text(json.dumps(own), encoding="utf-8")
    code = f"import pathlib\npathlib.Path({str(marker)!r}).touch()\nclass Own: pass\n"
    (folder / "own.py").write_text(code, encoding="utf-8")
    recipe = {
        "model": {"name": "GPT2LMHeadModel"},
        "data": {"tokenizer": str(folder), "max_bytes": 100_000},
        "arguments": {"output_dir": str(tmp_path / "out"), "max_steps": 1},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe), encoding="utf-8")
    assert main(["train", str(path), "--device", "cpu"]) == 2
    assert "holds no tokenizer that transformers can load" in capsys.readouterr().err


# ---- checkpoints ----


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a small model after one step."""
    folder = tmp_path_factory.mktemp("saved")
    mesh.reset()
    merak.init(device="cpu")
    trainer(folder).train()
    mesh.reset()
    return folder / "checkpoint-1"


def trainer(folder: Path, **arguments: Any) -> merak.MerakTrainer:
    config = transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=8,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    args = merak.MerakArguments(
        output_dir=str(folder), max_steps=1, save_steps=1, report_to="none", trace_cache="",
        disable_tqdm=True, per_device_train_batch_size=2, **arguments,
    )  # fmt: skip
    ids = torch.arange(8)
    data = [{"input_ids": ids, "labels": ids} for _ in range(8)]
    return merak.MerakTrainer(
        model=transformers.GPT2LMHeadModel(config), args=args, train_dataset=data
    )


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, to be tampered with."""
    made: Path = shutil.copytree(saved, tmp_path / "job" / saved.name)
    return made


def refused(checkpoint: Path, output_dir: str = "") -> str:
    """The sentence with which a checkpoint is refused."""
    with pytest.raises(MerakError) as caught:
        checkpoint_to_resume(str(checkpoint), output_dir)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_checkpoint_has_no_pickle(saved: Path) -> None:
    names = {file.name for file in saved.rglob("*") if file.is_file()}
    assert all(name.endswith((".json", ".safetensors", ".md")) for name in names), names
    assert MANIFEST in names


def test_no_file_of_a_checkpoint_is_read_as_a_pickle(
    saved: Path, checkpoint: Path, marker: Path
) -> None:
    files = [file.relative_to(saved) for file in saved.rglob("*") if file.is_file()]
    assert len(files) >= 4
    for file in files:
        for content in contents(marker).values():
            (checkpoint / file).write_bytes(content)
            refused(checkpoint)
            assert not marker.exists(), file
        shutil.copyfile(saved / file, checkpoint / file)


def test_pickles_beside_a_checkpoint_are_not_looked_at(
    checkpoint: Path, marker: Path, one_rank: None
) -> None:
    """Of names that transformers and torch load by themselves."""
    for name in (
        "optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt", "rng_state.pth",
        "rng_state_0.pth", "training_args.bin", "pytorch_model.bin", "adapter_model.bin",
        ".metadata", "merak/.metadata",
    ):  # fmt: skip
        (checkpoint / name).parent.mkdir(exist_ok=True)
        (checkpoint / name).write_bytes(torch_saved(marker))
    result = trainer(checkpoint.parent).train(resume_from_checkpoint=str(checkpoint))
    assert result.global_step == 1


def test_a_pickled_index_is_read_only_if_that_is_allowed(tmp_path: Path, marker: Path) -> None:
    checkpoint = tmp_path / "checkpoint-1"
    (checkpoint / "merak").mkdir(parents=True)
    (checkpoint / "merak" / ".metadata").write_bytes(pickled(marker))
    TrainerState().save_to_json(str(checkpoint / "trainer_state.json"))
    assert "set allow_pickled_checkpoint=True" in refused(checkpoint)


def rewritten(checkpoint: Path, manifest: Manifest) -> None:
    """Write a manifest as an attacker would, with a checksum that is right."""
    (checkpoint / MANIFEST).write_text(manifest.text(), encoding="utf-8")


ESCAPES = ("../outside.safetensors", "a/../../outside.safetensors", "{outside}", "..\\outside")


@pytest.mark.parametrize("escape", ESCAPES)
@pytest.mark.parametrize("place", ["files", "tensors"])
def test_a_manifest_names_no_file_outside(checkpoint: Path, escape: str, place: str) -> None:
    outside = checkpoint.parent / "outside.safetensors"
    manifest = read_manifest(checkpoint)
    held = next(box.file for tensor in manifest.tensors.values() for box in tensor.boxes)
    shutil.copyfile(checkpoint / held, outside)
    name = escape.format(outside=outside)
    files = {**manifest.files, name: manifest.files[held]}
    if place == "files":
        rewritten(checkpoint, replace(manifest, files=files))
    else:
        tensors = {
            key: replace(t, boxes=tuple(replace(box, file=name) for box in t.boxes))
            for key, t in manifest.tensors.items()
        }
        rewritten(checkpoint, replace(manifest, tensors=tensors))
    assert "is no name of a file in the folder" in refused(checkpoint)
    assert load_file(outside)  # neither read nor written


@pytest.mark.parametrize("through", ["file", "folder"])
def test_a_link_out_of_a_checkpoint_is_not_followed(checkpoint: Path, through: str) -> None:
    manifest = read_manifest(checkpoint)
    held = next(box.file for tensor in manifest.tensors.values() for box in tensor.boxes)
    outside = checkpoint.parent / "elsewhere"
    outside.mkdir()
    shutil.move(checkpoint / held, outside / held)
    if through == "file":
        os.symlink(outside / held, checkpoint / held)
    else:
        os.symlink(outside, checkpoint / "inner")
        name = f"inner/{held}"
        files = {name if n == held else n: f for n, f in manifest.files.items()}
        tensors = {
            key: replace(
                t,
                boxes=tuple(replace(b, file=name) if b.file == held else b for b in t.boxes),
            )
            for key, t in manifest.tensors.items()
        }
        rewritten(checkpoint, replace(manifest, files=files, tensors=tensors))
    assert "is missing" in refused(checkpoint)


def test_a_checkpoint_that_is_half_written_leads_nowhere(tmp_path: Path) -> None:
    """Left-over folders are removed by name, and a link among them is not followed."""
    outside, job = tmp_path / "outside", tmp_path / "job"
    outside.mkdir()
    (outside / "kept").write_text("", encoding="utf-8")
    job.mkdir()
    os.symlink(outside, job / ".checkpoint-3.partial")
    from merak.checkpoint.files import remove_partial

    remove_partial(job)
    assert (outside / "kept").exists()


def test_sizes_of_a_manifest_are_not_believed(checkpoint: Path) -> None:
    manifest = read_manifest(checkpoint)
    name, file = max(manifest.files.items(), key=lambda one: one[1].num_bytes)
    other = StoredFile(**{**vars_of(file), "num_bytes": 2**60})
    rewritten(checkpoint, replace(manifest, files={**manifest.files, name: other}))
    assert "in the place of 1,152,921,504,606,846,976" in refused(checkpoint)


def vars_of(file: StoredFile) -> dict[str, Any]:
    return {"num_bytes": file.num_bytes, "checksum": file.checksum}
