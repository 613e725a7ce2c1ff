"""A recipe's data: where records come from, and how they become samples."""

import errno
import itertools
import json
from dataclasses import replace
from pathlib import Path

import datasets
import pytest
from transformers import default_data_collator

from merak.cli.recipe.data.corpus import Corpus, TokenJob, prepare, stream
from merak.cli.recipe.data.encoding import every_nth, first_bytes, texts_of
from merak.cli.recipe.data.objective import Objective
from merak.cli.recipe.data.records import Records, find_source
from merak.cli.recipe.data.tokenizer import tokenizer_name
from merak.cli.recipe.schema import DataRecipe
from merak.core.errors import CommandError, SavingError

WORDS = ["one ring to rule them all", "one ring to find them", "in the land of shadows"] * 8


@pytest.fixture
def recipe(tmp_path: Path) -> DataRecipe:
    """Twenty-four text files, a sequence of 16 tokens."""
    folder = tmp_path / "texts" / "deep"
    folder.mkdir(parents=True)
    for number, text in enumerate(WORDS):
        (folder / f"{number:02}.txt").write_text(text, encoding="utf-8")
    return DataRecipe(source=str(tmp_path / "texts"), vocabulary=280, sequence=16, held_out=0.25)


def job(recipe: DataRecipe, folder: Path, packing: str = "joined", kind: str = "text") -> TokenJob:
    name = tokenizer_name(recipe, "GPT2LMHeadModel")
    return TokenJob(
        recipe, find_source(recipe), Objective.CAUSAL, kind, packing, name, folder / "packed"
    )


def folders(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "packed").iterdir() if path.is_dir()}


def tokens(corpus: Corpus, held_out: bool = False) -> list[int]:
    rows = corpus.held_out if held_out else corpus.train
    return [token for row in rows["input_ids"] for token in row]


def texts(recipe: DataRecipe, max_bytes: int | None = None) -> list[str]:
    rows = first_bytes(find_source(recipe).train, recipe.column, max_bytes)
    return list(texts_of(rows, recipe.column))


def test_packs_and_splits_by_text(recipe: DataRecipe, tmp_path: Path) -> None:
    corpus = prepare(job(recipe, tmp_path))
    tokenizer = corpus.processor
    assert len(tokenizer) <= 280 and tokenizer.mask_token_id is not None
    assert set(corpus.train.column_names) == {"input_ids", "labels"}
    assert all(len(row) == 16 for row in corpus.train["input_ids"])
    assert corpus.train["labels"][:] == corpus.train["input_ids"][:]
    kept = [text for index, text in enumerate(WORDS) if index % 4 != 3]
    text = tokenizer.decode(tokens(corpus))
    assert "<|endoftext|>".join(kept).startswith(text)
    assert len(text) > len("<|endoftext|>".join(kept)) - 16 * 20
    held_out = tokenizer.decode(tokens(corpus, held_out=True))
    assert held_out.startswith(WORDS[3] + "<|endoftext|>" + WORDS[7])
    assert "from 18 documents (packed, attention across documents)" in corpus.summary


def test_separate_documents_have_positions_of_their_own(recipe: DataRecipe, tmp_path: Path) -> None:
    corpus = prepare(job(recipe, tmp_path, "separate"))
    end = corpus.processor.eos_token_id
    for row in corpus.train:
        for i, position in enumerate(row["position_ids"]):
            is_first = i == 0 or row["input_ids"][i - 1] == end
            assert position == (0 if is_first else row["position_ids"][i - 1] + 1)
            assert row["labels"][i] == (-100 if is_first else row["input_ids"][i])


def test_is_made_once_and_anew_when_a_text_changes(recipe: DataRecipe, tmp_path: Path) -> None:
    made = []
    for _ in range(2):
        prepare(job(recipe, tmp_path))
        made.append(folders(tmp_path))
    assert made[0] == made[1] and len(made[0]) == 1
    (Path(recipe.source) / "deep" / "00.txt").write_text("something new", encoding="utf-8")
    prepare(job(recipe, tmp_path))
    prepare(job(replace(recipe, sequence=8), tmp_path))
    assert len(folders(tmp_path)) == 3
    few = prepare(job(replace(recipe, sequence=8, eval_samples=1), tmp_path))
    assert len(folders(tmp_path)) == 3 and len(few.held_out) == 1


def test_nothing_is_left_of_a_failure(recipe: DataRecipe, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"have fewer tokens than data\.sequence=4096"):
        prepare(job(replace(recipe, sequence=4096), tmp_path))
    assert not folders(tmp_path)


def test_what_never_came_to_the_disk_has_no_name(
    recipe: DataRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("merak.core.files.private_files.os.fsync", fail)
    with pytest.raises(SavingError, match="Input/output error"):
        prepare(job(recipe, tmp_path))
    assert not folders(tmp_path)


def test_tokenizer_of_ones_own(recipe: DataRecipe, tmp_path: Path) -> None:
    first = prepare(job(recipe, tmp_path))
    first.processor.save_pretrained(tmp_path / "mine")
    own = replace(recipe, tokenizer=str(tmp_path / "mine"), vocabulary=999)
    assert tokens(prepare(job(own, tmp_path))) == tokens(first)
    assert tokenizer_name(recipe, str(tmp_path / "mine")) == str(tmp_path / "mine")
    for wrong, said in (("nowhere", "is not a folder"), (str(tmp_path), "holds no tokenizer")):
        with pytest.raises(CommandError, match=said):
            prepare(job(replace(recipe, tokenizer=wrong), tmp_path))


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet", "csv"])
def test_rows_of_files(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"texts.{suffix}"
    rows = datasets.Dataset.from_dict({"number": list(range(24)), "body": WORDS})
    if suffix == "jsonl":
        file.write_text("\n\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    elif suffix == "json":
        file.write_text(json.dumps(list(rows)), encoding="utf-8")
    else:
        getattr(rows, f"to_{suffix}")(str(file))
    recipe = DataRecipe(source=str(file), column="body")
    assert texts(recipe) == WORDS
    assert texts(recipe, len(WORDS[0]) + 1) == WORDS[:2]
    with pytest.raises(CommandError, match=r"'bodi' is no column of .*number, body; did you mean"):
        find_source(recipe).train.check_column("bodi", recipe.source)


def test_lines_that_are_wrong(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    for content, said in (
        ('{"text": 1}\n{"text"', r"texts.jsonl:2 is not JSON"),
        ("[1]", r"texts.jsonl:1 is no JSON object"),
        ('{"text": "a"}\n{"txt": "b"}', r"record 2 of the data has no field 'text', only txt"),
    ):
        file.write_text(content, encoding="utf-8")
        with pytest.raises(CommandError, match=said):
            texts(DataRecipe(source=str(file)))


def test_saved_datasets(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"text": WORDS})
    rows.save_to_disk(str(tmp_path / "one"))
    one = DataRecipe(source=str(tmp_path / "one"))
    assert texts(one) == WORDS
    datasets.DatasetDict(test=rows, spare=rows.select([0])).save_to_disk(str(tmp_path / "dict"))
    with pytest.raises(CommandError, match="has the splits test, spare, but no train"):
        find_source(DataRecipe(source=str(tmp_path / "dict")))
    found = find_source(DataRecipe(source=str(tmp_path / "dict"), split="spare"))
    assert found.held_out is not None
    assert [len(list(part)) for part in (found.train, found.held_out)] == [1, 24]


def test_standard_library_is_everywhere() -> None:
    recipe = DataRecipe()
    assert sum(map(len, texts(recipe, 100_000))) >= 100_000
    assert all("site-packages" not in str(file) for file in find_source(recipe).train.files)


def test_sources_that_are_not_there(recipe: DataRecipe, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="'nowhere' is neither a file nor a folder"):
        find_source(replace(recipe, source="nowhere"))
    with pytest.raises(CommandError, match=r"has no files that match data.files='\*.md'"):
        find_source(replace(recipe, files="*.md"))
    lonely = tmp_path / "one.txt"
    lonely.write_text("alone", encoding="utf-8")
    with pytest.raises(CommandError, match=r"one record cannot be split .*data.held_out: 0"):
        prepare(job(replace(recipe, source=str(lonely)), tmp_path))


def test_a_dataset_of_the_hub_without_a_network(
    recipe: DataRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("merak.zoo.hub.answers", lambda: False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(CommandError) as caught:
        find_source(replace(recipe, source="nobody/nothing"))
    assert "cannot be loaded from the hub as a dataset: Couldn't reach" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_streams_are_packed_and_held_out_by_content(recipe: DataRecipe, tmp_path: Path) -> None:
    for number in range(24):
        file = Path(recipe.source) / "deep" / f"{number:02}.txt"
        file.write_text(f"<{number}> " * 20, encoding="utf-8")
    streamed = replace(recipe, streaming=True, shuffle_buffer=4, held_out=0.4)
    corpus = stream(job(streamed, tmp_path, "separate"))

    def ids(rows: object) -> list[list[int]]:
        return [list(map(int, row["input_ids"])) for row in rows]  # type: ignore[attr-defined]

    first = ids(corpus.train)
    assert all(len(row) == 16 for row in first) and ids(corpus.train) == first
    trained, evaluated = (
        {
            number
            for number in range(24)
            if f"<{number}>" in corpus.processor.decode([i for row in rows for i in row])
        }
        for rows in (first, ids(corpus.held_out))
    )
    assert trained and evaluated and not trained & evaluated
    corpus.train.set_epoch(1)
    assert ids(corpus.train) != first


def test_streamed_samples_make_the_batches_of_prepared_ones(
    recipe: DataRecipe, tmp_path: Path
) -> None:
    prepared = prepare(job(recipe, tmp_path, "separate")).train
    streaming = replace(recipe, streaming=True, held_out=0)
    streamed = stream(job(streaming, tmp_path, "separate")).train
    ours, theirs = (
        default_data_collator(list(itertools.islice(rows, 2))) for rows in (streamed, prepared)
    )
    assert {name: (column.shape, column.dtype) for name, column in ours.items()} == {
        name: (column.shape, column.dtype) for name, column in theirs.items()
    }


def test_a_stream_of_which_nothing_is_held_out(recipe: DataRecipe, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"data.held_out=1e-09 of the records .* these are none"):
        stream(job(replace(recipe, streaming=True, held_out=1e-9), tmp_path))


def test_every_nth() -> None:
    rows = [{"n": n} for n in range(7)]
    assert [row["n"] for row in every_nth(rows, 3, True)] == [2, 5]
    assert [row["n"] for row in every_nth(rows, 3, False)] == [0, 1, 3, 4, 6]


def test_records_know_their_columns(tmp_path: Path) -> None:
    assert Records((), "text").columns == []
