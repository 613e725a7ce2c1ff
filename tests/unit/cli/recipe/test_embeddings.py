"""Recipes for embeddings: the parts of a training, and what is refused before it."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import merak
from merak.cli.main import main
from merak.cli.recipe.parts import make_parts
from merak.cli.recipe.recipe import read_recipe
from merak.core import mesh
from tests.multirank.sentence_jobs import encoder, save_words
from tests.multirank.test_recipes import write_texts

pytest.importorskip("sentence_transformers")


@pytest.fixture(autouse=True)
def mesh_of_ones_own() -> Iterator[None]:
    mesh.reset()
    yield
    mesh.reset()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("embeddings")
    save_words(str(made / "words"))
    write_texts(made / "pairs.jsonl")
    columns: dict[str, Any] = {
        "id": lambda n: n,
        "one": lambda n: f"what is {n}",
        "other": lambda n: f"it is {n}",
        "likeness": lambda n: n / 40,
    }
    write_texts(made / "scored.jsonl", **columns)
    rows = [{name: make(n) for name, make in columns.items()} for n in range(40)]
    with (made / "scored.tsv").open("w", newline="") as file:
        written = csv.DictWriter(file, list(columns), delimiter="\t")
        written.writeheader()
        written.writerows(rows)
    return made


def words(folder: Path, out: Path, source: str = "pairs.jsonl") -> list[str]:
    return [
        f"model.name={folder / 'words'}", f"data.source={folder / source}", "data.sequence=32",
        f"arguments.output_dir={out}",
    ]  # fmt: skip


SCORED = [
    "embeddings.loss=CoSENTLoss", "embeddings.columns=[one, other]", "data.label_column=likeness",
]  # fmt: skip


@pytest.mark.parametrize("source", ["scored.jsonl", "scored.tsv"])
def test_columns_are_those_of_the_loss_and_texts_are_padded(
    source: str, folder: Path, tmp_path: Path
) -> None:
    merak.init(device="cpu")
    given = [*SCORED, "embeddings.prompts={one: 'ask '}", "embeddings.pad_to_multiple_of=16"]
    parts = make_parts(read_recipe("embeddings", [*words(folder, tmp_path, source), *given]))
    train = parts.corpus.train
    assert train.column_names == ["one", "other", "score"] and len(train) == 39
    batch = parts.data_collator(list(train.select(range(2))))
    assert batch["one_input_ids"].shape == batch["other_input_ids"].shape == (2, 16)
    prompted = batch["one_attention_mask"].sum(1) - batch["other_attention_mask"].sum(1)
    assert prompted.tolist() == [len("ask ") + len("what") - len("it")] * 2
    assert batch["label"].tolist() == pytest.approx([row["score"] for row in train.select([0, 1])])
    assert type(parts.losses["loss"]).__name__ == "CoSENTLoss"


def test_a_model_is_made_without_weights_and_with_its_pooling(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    merak.init(device="cpu")
    encoder(str(folder / "words")).save(str(tmp_path / "whole"))
    chosen = ["embeddings.pooling=cls", "embeddings.matryoshka_dims=[32, 16]"]
    for changes, pooling, loss in (
        ([], "mean", "MultipleNegativesRankingLoss"),
        (chosen, "cls", "MatryoshkaLoss"),
        ([f"model.name={tmp_path / 'whole'}"], "mean", "MultipleNegativesRankingLoss"),
        (["lora={r: 2, target_modules: [query]}"], "mean", "MultipleNegativesRankingLoss"),
    ):
        parts = make_parts(read_recipe("embeddings", [*words(folder, tmp_path), *changes]))
        assert parts.model[1].pooling_mode == pooling
        assert type(parts.losses["loss"]).__name__ == loss
        assert all(parameter.is_meta for parameter in parts.model.parameters())
        trained = [name for name, one in parts.model.named_parameters() if one.requires_grad]
        assert all("lora" in name for name in trained) == ("lora" in str(changes))


def test_a_dry_run_says_what_would_start_and_what_is_not_taken(
    folder: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    changes = ["parallel.pp=2", "data.format=null", "data.packing=none", "data.prompt_loss=true"]
    command = ["train", "embeddings", *words(folder, tmp_path), *changes]
    assert main([*command, "--dry-run", "--json", "--device", "cpu"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["model"], found["ranks"]) == ("BertModel", 2)
    assert "format embeddings, and not taken: data.packing, data.prompt_loss." in caplog.text


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["model.name=BertModel"], "are learned from the weights of an encoder"),
        (["plan=auto"], "'auto' would choose the samples of a microbatch"),
        (["data.streaming=true"], "texts that belong together are prepared before training"),
        (["embeddings.pad_to_multiple_of=24"], "is no multiple of embeddings.pad_to"),
        (["data.sequence=64"], "data.sequence=64 is more than the 32 positions"),
        (["data.format=text"], "data.column='text' is no column of"),
        (["preference.beta=0.1"], "the section preference is for pairs of answers"),
        (["embeddings.loss=CoSENTLos"], "did you mean CoSENTLoss?"),
        (["embeddings.loss=CoSENTLoss"], "takes how similar both are, and"),
        (["embeddings.loss=TripletLoss"], "takes 3 columns of texts, and"),
        (["embeddings.columns=[anchor, positiv]"], "did you mean positive?"),
        (["embeddings.loss_arguments={scal: 3}"], "is no argument of MultipleNegatives"),
        (["embeddings.batch_sampler=any"], "embeddings.batch_sampler='any'"),
        ([*SCORED, "embeddings.columns=null"], "takes 2 columns of texts, and"),
        ([*SCORED, "embeddings.columns=[id, one]"], "column 'id' of"),
        ([*SCORED, "data.label_column=one"], "takes how similar both are; name the"),
        ([*SCORED[1:], "embeddings.columns=null"], "or take a loss that reads it: CoSENTLoss"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(
    changes: list[str],
    sentence: str,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = "scored.jsonl" if SCORED[2] in changes or changes[:1] == SCORED[:1] else "pairs.jsonl"
    command = ["train", "embeddings", *words(folder, tmp_path, source), *changes]
    assert main([*command, "--dry-run", "--device", "cpu"]) == 2
    assert sentence in capsys.readouterr().err


def test_a_pooling_beside_that_of_the_folder_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    encoder(str(folder / "words")).save(str(tmp_path / "whole"))
    changes = [f"model.name={tmp_path / 'whole'}", "embeddings.pooling=cls"]
    command = ["train", "embeddings", *words(folder, tmp_path), *changes]
    assert main([*command, "--dry-run", "--device", "cpu"]) == 2
    assert "is a SentenceTransformer with a pooling of its own" in capsys.readouterr().err


def test_commands_before_a_job_know_no_embeddings(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = [part for word in words(folder, tmp_path) for part in ("--set", word)]
    assert main(["memory", "--model", "recipe:embeddings", *changes]) == 2
    assert "of which sentence-transformers' trainer makes" in capsys.readouterr().err
