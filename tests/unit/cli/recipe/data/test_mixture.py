"""Several datasets in one recipe: drawn by weight, none left out, none in both parts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from merak.cli.recipe.data.corpus import TokenJob, prepare, stream
from merak.cli.recipe.data.mixture import drawn, find_data
from merak.cli.recipe.data.objective import Objective
from merak.cli.recipe.recipe import parse_recipe
from merak.cli.recipe.schema import CHATML, DataRecipe
from merak.core.errors import CommandError


def write(file: Path, rows: Iterable[dict[str, Any]]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


@pytest.fixture
def mixed(tmp_path: Path) -> DataRecipe:
    """Forty texts beside ten of another column, which come four times as often."""
    first = write(tmp_path / "a.jsonl", ({"text": f"a{n}"} for n in range(40)))
    second = write(tmp_path / "b.jsonl", ({"body": f"b{n}", "more": n} for n in range(10)))
    mix = [{"source": first, "weight": 1}, {"source": second, "column": "body", "weight": 4}]
    return DataRecipe(mix=mix, vocabulary=300, sequence=8, held_out=0.2)


def job(recipe: DataRecipe, folder: Path, kind: str = "text", seed: int = 1) -> TokenJob:
    found = find_data(recipe, seed)
    packing = "none" if kind == "chat" else "joined"
    return TokenJob(recipe, found, Objective.CAUSAL, kind, packing, "train", folder / "data", seed)


def texts(rows: Iterable[Any]) -> list[str]:
    return [str(row["text"]) for row in rows]


def test_records_come_by_their_weights_until_each_dataset_has_ended() -> None:
    ends = {"a": 300, "b": 100}

    def part(name: str) -> Any:
        return lambda: ({"text": f"{name}{number}"} for number in range(ends[name]))

    found = texts(drawn([part("a"), part("b")], [1, 4], seed=3))
    counts = Counter(text[0] for text in found)
    assert {text for text in found if text[0] == "a"} == {f"a{number}" for number in range(300)}
    assert 3 < counts["b"] / counts["a"] < 5
    assert [text for text in found if text[0] == "b"][:101] == [
        *(f"b{number}" for number in range(100)), "b0",
    ]  # fmt: skip
    assert texts(drawn([part("a"), part("b")], [1, 4], seed=3)) == found
    assert texts(drawn([part("a"), part("b")], [1, 4], seed=4)) != found


def test_without_weights_each_record_comes_once(mixed: DataRecipe, tmp_path: Path) -> None:
    assert mixed.mix is not None
    plain = [{k: v for k, v in entry.items() if k != "weight"} for entry in mixed.mix]
    own = job(replace(mixed, mix=plain), tmp_path)
    train = texts(own.rows(held_out=False))
    assert train == sorted(set(train), key=lambda text: (text[0], int(text[1:])))
    assert len(train) == 40
    with pytest.raises(CommandError, match=r"give each entry of data\.mix a weight"):
        find_data(replace(mixed, mix=plain, streaming=True))
    with pytest.raises(CommandError, match=r"1 of the 2 entries of data\.mix have"):
        find_data(replace(mixed, mix=[plain[0], mixed.mix[1]]))


def test_a_dataset_without_records_has_ended() -> None:
    assert texts(drawn([lambda: [{"text": "a"}], lambda: []], [1, 1], seed=0)) == ["a"]


def test_no_record_is_trained_on_and_evaluated_with(mixed: DataRecipe, tmp_path: Path) -> None:
    own = job(mixed, tmp_path)
    train, held_out = texts(own.rows(held_out=False)), texts(own.rows(held_out=True))
    assert not set(train) & set(held_out)
    assert set(train) | set(held_out) == {
        *(f"a{number}" for number in range(40)), *(f"b{number}" for number in range(10)),
    }  # fmt: skip
    assert len(held_out) == len(set(held_out)) == 10
    assert Counter(text[0] for text in held_out) == {"a": 8, "b": 2}


def test_prepared_samples_are_made_anew_for_another_mixture(
    mixed: DataRecipe, tmp_path: Path
) -> None:
    assert mixed.mix is not None
    sizes = []
    for weight in (4, 4, 1):
        recipe = replace(mixed, mix=[mixed.mix[0], mixed.mix[1] | {"weight": weight}])
        sizes.append(len(prepare(job(recipe, tmp_path)).train))
    assert sizes[0] == sizes[1] > sizes[2]
    assert len(list((tmp_path / "data").glob("packed-*.lock"))) == 2


def test_what_is_streamed(mixed: DataRecipe, tmp_path: Path) -> None:
    own = replace(mixed, streaming=True, shuffle_buffer=0, held_out=0.0)
    corpus = stream(job(own, tmp_path))
    rows = list(islice(corpus.train, 4))
    text = corpus.processor.decode([token for row in rows for token in row["input_ids"]])
    expected = "".join(texts(job(own, tmp_path).rows(held_out=False)))
    assert len(rows) == 4 and text.replace("<|endoftext|>", "")[:12] == expected[:12]


@pytest.mark.parametrize("streaming", [False, True])
def test_conversations_of_several_forms(streaming: bool, tmp_path: Path) -> None:
    first = write(
        tmp_path / "a.jsonl",
        (
            {
                "messages": [
                    {"role": "user", "content": "?"},
                    {"role": "assistant", "content": str(n)},
                ]
            }
            for n in range(6)
        ),
    )
    second = write(tmp_path / "b.jsonl", ({"instruction": "!", "output": f"{n}"} for n in range(6)))
    recipe = DataRecipe(
        mix=[{"source": file, "weight": 1} for file in (first, second)], vocabulary=300,
        sequence=64, held_out=0.0, chat_template=CHATML, streaming=streaming, shuffle_buffer=0,
    )  # fmt: skip
    make = stream if streaming else prepare
    corpus = make(job(recipe, tmp_path, "chat"))
    found = [corpus.processor.decode(row["input_ids"]) for row in corpus.train]
    assert len(found) >= 12
    assert any("?" in text for text in found) and any("!" in text for text in found)


@pytest.mark.parametrize(
    ("mix", "said"),
    [
        ([], "data.mix names no dataset"),
        ([{"weight": 2}], r"data.mix\[0\] names no dataset"),
        ([{"source": "A", "wait": 2}], r"data.mix\[0\] has no field 'wait'"),
        (
            [{"source": "A", "weight": 1}, {"source": "A", "weight": 0}],
            r"data.mix\[1\] has the weight 0",
        ),
        ([{"source": "nowhere.jsonl"}], "is neither a file nor a folder"),
        ([{"source": "A", "column": "body"}], "data.column='body' is no column"),
    ],
)
def test_entries_that_are_wrong(mix: list[dict[str, Any]], said: str, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [{"text": "a"}])
    mix = [entry | ({"source": file} if entry.get("source") == "A" else {}) for entry in mix]
    with pytest.raises(CommandError, match=said):
        find_data(DataRecipe(mix=mix))


def test_a_recipe_names_its_data_once() -> None:
    data = {"source": "a.jsonl", "mix": [{"source": "b.jsonl"}]}
    recipe = {"model": {"name": "M"}, "data": data, "arguments": {"output_dir": "runs"}}
    with pytest.raises(CommandError, match=r"data.source and data.mix both name data"):
        parse_recipe(recipe)
    del data["source"]
    assert parse_recipe(recipe).data.name == "b.jsonl"
