"""A recipe's data: where texts come from, and how they become samples."""

import json
from dataclasses import replace
from pathlib import Path

import datasets
import pytest

from merak.cli.recipe.corpus import pack_corpus
from merak.cli.recipe.recipe import DataRecipe
from merak.cli.recipe.texts import Texts, find_source
from merak.launch.errors import CommandError

WORDS = ["one ring to rule them all", "one ring to find them", "in the land of shadows"] * 8


@pytest.fixture
def recipe(tmp_path: Path) -> DataRecipe:
    """Twenty-four text files, a sequence of 16 tokens."""
    folder = tmp_path / "texts" / "deep"
    folder.mkdir(parents=True)
    for number, text in enumerate(WORDS):
        (folder / f"{number:02}.txt").write_text(text, encoding="utf-8")
    return DataRecipe(source=str(tmp_path / "texts"), vocabulary=280, sequence=16, held_out=0.25)


def texts_of(recipe: DataRecipe) -> Texts:
    found = find_source(recipe)
    assert isinstance(found, Texts)
    return found


def test_packs_and_splits_by_text(recipe: DataRecipe, tmp_path: Path) -> None:
    corpus = pack_corpus(texts_of(recipe), None, recipe, tmp_path / "packed")
    tokenizer = corpus.tokenizer
    assert tokenizer is not None and corpus.held_out is not None
    assert len(tokenizer) <= 280 and tokenizer.mask_token_id is not None
    assert set(corpus.train.column_names) == {"input_ids", "labels"}
    assert all(len(row) == 16 for row in corpus.train["input_ids"])
    assert corpus.train["labels"][:] == corpus.train["input_ids"][:]
    tokens = [token for row in corpus.train["input_ids"] for token in row]
    kept = [text for index, text in enumerate(WORDS) if index % 4 != 3]
    text = tokenizer.decode(tokens)
    assert "<|endoftext|>".join(kept).startswith(text)
    assert len(text) > len("<|endoftext|>".join(kept)) - 16 * 20
    held_out = tokenizer.decode([t for row in corpus.held_out["input_ids"] for t in row])
    assert held_out.startswith(WORDS[3] + "<|endoftext|>" + WORDS[7])


def test_is_made_once_and_anew_when_a_text_changes(recipe: DataRecipe, tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    made = []
    for _ in range(2):
        pack_corpus(texts_of(recipe), None, recipe, folder)
        made.append({path.name for path in folder.iterdir() if path.is_dir()})
    assert made[0] == made[1] and len(made[0]) == 1
    (Path(recipe.source) / "deep" / "00.txt").write_text("something new", encoding="utf-8")
    pack_corpus(texts_of(recipe), None, recipe, folder)
    pack_corpus(texts_of(recipe), None, replace(recipe, sequence=8), folder)
    assert len({path.name for path in folder.iterdir() if path.is_dir()}) == 3


def test_nothing_is_left_of_a_failure(recipe: DataRecipe, tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    long = replace(recipe, sequence=4096)
    with pytest.raises(CommandError, match=r"have fewer than data\.sequence=4096 tokens"):
        pack_corpus(texts_of(long), None, long, folder)
    assert not [path for path in folder.iterdir() if path.is_dir()]


def test_tokenizer_of_ones_own(recipe: DataRecipe, tmp_path: Path) -> None:
    first = pack_corpus(texts_of(recipe), None, recipe, tmp_path / "packed")
    assert first.tokenizer is not None
    first.tokenizer.save_pretrained(tmp_path / "mine")
    own = replace(recipe, tokenizer=str(tmp_path / "mine"), vocabulary=999)
    again = pack_corpus(texts_of(own), None, own, tmp_path / "packed")
    assert again.train["input_ids"][:] == first.train["input_ids"][:]
    for wrong, said in (("nowhere", "is not a folder"), (str(tmp_path), "holds no tokenizer")):
        bad = replace(recipe, tokenizer=wrong)
        with pytest.raises(CommandError, match=said):
            pack_corpus(texts_of(bad), None, bad, tmp_path / "packed")


def test_json_lines_and_byte_limit(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    lines = "\n\n".join(json.dumps({"body": text}) for text in WORDS)
    file.write_text(lines, encoding="utf-8")
    recipe = DataRecipe(source=str(file), column="body")
    assert texts_of(recipe).read(None) == WORDS
    assert texts_of(recipe).read(len(WORDS[0]) + 1) == WORDS[:2]
    with pytest.raises(CommandError, match=r"texts.jsonl:1 is not a JSON object .* 'text'"):
        texts_of(replace(recipe, column="text")).read(None)


def test_saved_datasets(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"text": WORDS})
    rows.save_to_disk(str(tmp_path / "one"))
    found = find_source(DataRecipe(source=str(tmp_path / "one")))
    assert isinstance(found, datasets.DatasetDict) and found["train"]["text"][:] == WORDS
    assert Texts((), "text", found["train"]).read(None) == WORDS
    datasets.DatasetDict(test=rows).save_to_disk(str(tmp_path / "dict"))
    with pytest.raises(CommandError, match="has the splits test, but no train"):
        find_source(DataRecipe(source=str(tmp_path / "dict")))


def test_standard_library_is_everywhere() -> None:
    texts = texts_of(DataRecipe()).read(100_000)
    assert sum(map(len, texts)) >= 100_000
    assert all("site-packages" not in str(file) for file in texts_of(DataRecipe()).files)


def test_sources_that_are_not_there(recipe: DataRecipe, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="'nowhere' is neither a file nor a folder"):
        find_source(replace(recipe, source="nowhere"))
    with pytest.raises(CommandError, match=r"has no files that match data.files='\*.md'"):
        find_source(replace(recipe, files="*.md"))
    lonely = tmp_path / "one.txt"
    lonely.write_text("alone", encoding="utf-8")
    alone = replace(recipe, source=str(lonely))
    with pytest.raises(CommandError, match=r"1 texts cannot be split .*data.held_out: 0"):
        pack_corpus(texts_of(alone), None, alone, tmp_path / "packed")
