"""Recipes for conversations with images: their batches, and what is refused before training."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest

from merak.cli.main import main
from merak.cli.recipe.data.vision import PaddedConversations, load_processor, with_images
from tests.multirank.test_recipes import write_model, write_vision

pytest.importorskip("trl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("vision")
    write_vision(made)
    return made


def words(folder: Path, out: Path) -> list[str]:
    return [
        f"model.name={folder / 'model'}", f"data.source={folder / 'seen.jsonl'}",
        "data.sequence=64", f"arguments.output_dir={out}",
    ]  # fmt: skip


def test_answers_alone_have_labels_and_samples_one_length(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "seen.jsonl").read_text("utf-8").splitlines()]
    dataset = with_images(datasets.Dataset.from_list(rows[14:18]), (folder / "seen.jsonl",))
    processor = load_processor(str(folder / "model"))
    batch = PaddedConversations.of(processor, 64, answers_only=True)(list(dataset))
    assert batch["input_ids"].shape == batch["labels"].shape == (4, 64)
    assert batch["pixel_values"].shape == (4, 3, 32, 32)
    answers = [processor.tokenizer.decode(row[row != -100]) for row in batch["labels"]]
    assert answers == ["a cat<end>"] * 2 + ["a dog<end>"] * 2
    ids = batch["input_ids"]
    assert (ids == processor.image_token_id).sum(1).tolist() == [16] * 4


def test_a_dry_run_says_what_would_start(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "vision", *words(folder, tmp_path), "parallel.pp=2", "data.format=null"]
    assert main([*command, "--dry-run", "--json", "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["model"], found["ranks"]) == ("LlavaForConditionalGeneration", 2)


def test_what_does_not_fit_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path / "text")
    (tmp_path / "plain.jinja").write_text("{{ messages[0]['content'] }}", "utf-8")
    for change, sentence in [
        (f"model.name={tmp_path / 'text'}", "need a model that reads both, with its processor"),
        (f"data.tokenizer={tmp_path / 'text'}", "has no processor of images and text, but"),
        (f"data.chat_template={tmp_path / 'plain.jinja'}", "set data.prompt_loss: true."),
        ("data.streaming=true", "conversations with images are prepared before training"),
    ]:
        command = ["train", "vision", *words(folder, tmp_path), change, "arguments.max_steps=2"]
        assert main([*command, "--dry-run", "--device", "cpu"]) == 2
        assert sentence in capsys.readouterr().err
