"""Finished files take their places: nothing that a reader could find is ever incomplete."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from merak.checkpoint.pretrained.placing import place_folder, start_folder, unfinished_folder

INDEX = "model.safetensors.index.json"


def prepare(target: Path, files: dict[str, str]) -> Path:
    unfinished = unfinished_folder(target)
    start_folder(target, unfinished)
    fill(unfinished, files)
    return unfinished


def fill(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def of_parts(count: int) -> dict[str, str]:
    names = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    index = json.dumps({"weight_map": {str(n): name for n, name in enumerate(names)}})
    return {**dict.fromkeys(names, "weights"), INDEX: index, "config.json": "{}"}


ONE = {"model.safetensors": "weights", "config.json": "{}"}


def assert_readable(folder: Path) -> None:
    """What `from_pretrained` looks for is there: one file, or all that the index names."""
    if (folder / "model.safetensors").is_file():
        return
    named = json.loads((folder / INDEX).read_text())["weight_map"].values()
    assert all((folder / name).is_file() for name in named)


@pytest.mark.parametrize("before", [ONE, of_parts(2), of_parts(3)])
@pytest.mark.parametrize("after", [ONE, of_parts(2), of_parts(4)])
def test_a_reader_finds_whole_weights_at_any_time(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: dict[str, str],
    after: dict[str, str],
) -> None:
    target = tmp_path / "out"
    others = {"tokenizer.json": "{}", "model_of_mine.safetensors": "mine", "model.txt": ""}
    fill(target, before | others)
    unfinished = prepare(target, after)
    replace, unlink = os.replace, Path.unlink

    def watched_replace(source: Path, place: Path) -> None:
        replace(source, place)
        assert_readable(target)

    def watched_unlink(path: Path) -> None:
        unlink(path)
        if path.parent == target:
            assert_readable(target)

    monkeypatch.setattr(os, "replace", watched_replace)
    monkeypatch.setattr(Path, "unlink", watched_unlink)
    place_folder(unfinished, target)
    assert {path.name for path in target.iterdir()} == (after | others).keys()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_new_folder_appears_by_one_rename(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "out"
    unfinished = prepare(target, of_parts(2) | {"other/adapter_model.safetensors": "adapter"})
    assert unfinished.parent == target.parent
    inode = unfinished.stat().st_ino
    place_folder(unfinished, target)
    assert target.stat().st_ino == inode
    assert [path.name for path in target.parent.iterdir()] == ["out"]


def test_adapters_leave_the_weights_alone(tmp_path: Path) -> None:
    target = tmp_path / "out"
    fill(target, of_parts(2))
    adapters = {"second/adapter_model.safetensors": "adapter", "README.md": ""}
    place_folder(prepare(target, adapters), target)
    assert {path.name for path in target.iterdir()} == {*of_parts(2), "second", "README.md"}
    assert (target / "second" / "adapter_model.safetensors").read_text() == "adapter"


def test_what_an_earlier_save_has_left_is_removed(tmp_path: Path) -> None:
    left = prepare(tmp_path / "out", of_parts(3))
    assert list(prepare(tmp_path / "out", {}).iterdir()) == []
    assert left == unfinished_folder(tmp_path / "out")


def test_a_link_to_a_folder_gets_the_files(tmp_path: Path) -> None:
    fill(tmp_path / "real", ONE)
    (tmp_path / "out").symlink_to(tmp_path / "real")
    place_folder(prepare(tmp_path / "out", of_parts(2)), tmp_path / "out")
    assert (tmp_path / "out").is_symlink()
    assert {path.name for path in (tmp_path / "real").iterdir()} == of_parts(2).keys()


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(NotADirectoryError, match="out is a file"):
        prepare(tmp_path / "out", {})
