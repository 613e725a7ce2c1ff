"""Which columns a rank reads, and what is said about those that are missing or unwanted."""

import copy
from typing import Any, ClassVar

import datasets
import pytest
import torch
from tokenizers import Tokenizer, models
from torch.utils.data import DataLoader, default_collate
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    DefaultDataCollator,
    PreTrainedTokenizerFast,
    default_data_collator,
)

from merak.core.errors import DataError
from merak.data import check_columns, check_not_empty
from merak.data.columns import columns_read
from merak.data.fetch import KnownColumns, make_fetch
from tests.unit.data.helpers import TakesAll, plain_loader, prepared_loader, same, share


def tokenizer():
    words = {word: index for index, word in enumerate(["[PAD]", "[MASK]", "a", "b", "c"])}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="[PAD]")),
        pad_token="[PAD]",
        mask_token="[MASK]",
    )


def padded_rows():
    rows = [[2] * (1 + index % 3) for index in range(8)]
    return datasets.Dataset.from_dict(
        {
            "input_ids": rows,
            "attention_mask": [[1] * len(row) for row in rows],
            "label": list(range(8)),
            "text": ["words"] * 8,
        }
    )


class Guarded(dict):
    """A sample that says which of its columns were read."""

    read: ClassVar[set[str]] = set()

    def __getitem__(self, column):
        Guarded.read.add(column)
        return super().__getitem__(column)


class GuardedDataset:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return Guarded(input_ids=[index], label=index, pixel_values=[[0.5]])


@pytest.mark.parametrize("collate", [default_data_collator, DefaultDataCollator()])
def test_only_wanted_columns_of_plain_samples_are_read(collate):
    Guarded.read = set()
    (batch, _) = share(plain_loader(GuardedDataset(), collate_fn=collate), 1, 0, ("labels",))
    assert batch["labels"].tolist() == [0, 1]
    assert batch.keys() == {"labels"}
    assert Guarded.read == {"label"}


def test_only_wanted_columns_of_a_hugging_face_dataset_are_read():
    rows = datasets.Dataset.from_dict({"input_ids": [[1], [2]], "labels": [[3], [4]]})
    fetch = make_fetch(rows, default_data_collator, ("labels",), 5)
    assert fetch.dataset.column_names == ["labels"]
    assert make_fetch(rows, default_data_collator, None, 5).dataset is rows
    transformed = rows.with_transform(lambda batch: {"labels": batch["input_ids"]})
    fetch = make_fetch(transformed, default_data_collator, ("labels",), 5)
    assert fetch.dataset is transformed
    (batch,) = share(plain_loader(transformed, collate_fn=default_data_collator), 1, 0, ("labels",))
    assert batch["labels"].tolist() == [[1], [2]]


def test_a_formatted_dataset_stays_formatted():
    rows = datasets.Dataset.from_dict({"input_ids": [[1], [2]], "labels": [[3], [4]]})
    (batch,) = share(plain_loader(rows.with_format("torch")), 1, 0, ("labels",))
    assert torch.equal(batch["labels"], torch.tensor([[3], [4]]))


def test_padding_needs_the_main_input():
    collate = DataCollatorWithPadding(tokenizer())
    assert columns_read(collate, ("labels",)) == {"label", "label_ids", "labels", "input_ids"}
    assert columns_read(collate, ("attention_mask",)) == {"attention_mask", "input_ids"}

    class Own(PreTrainedTokenizerFast):
        def pad(self, *args, **kwargs):
            return super().pad(*args, **kwargs)

    own = Own(tokenizer_object=tokenizer().backend_tokenizer, pad_token="[PAD]")
    assert columns_read(DataCollatorWithPadding(own), ("labels",)) is None


@pytest.mark.parametrize(
    "columns", [("input_ids",), ("attention_mask",), ("labels",), ("labels", "attention_mask")]
)
def test_padded_columns_are_those_of_the_whole_batch(columns):
    rows = padded_rows().remove_columns("text")

    def make():
        return plain_loader(rows, 3, collate_fn=DataCollatorWithPadding(tokenizer()))

    for whole, part in zip(share(make()), share(make(), columns=columns), strict=True):
        assert same({column: whole[column] for column in columns}, part)


def test_unused_columns_are_removed_before_the_collator(tmp_path):
    collate = DataCollatorWithPadding(tokenizer())
    rows = padded_rows()
    in_memory = [rows[index] for index in range(len(rows))]  # not a Hugging Face dataset: wrapped
    for dataset in (rows, in_memory):
        whole = list(share(prepared_loader(tmp_path, dataset, collate)))
        parts = list(share(prepared_loader(tmp_path, dataset, collate), columns=("labels",)))
        assert all(batch.keys() == {"input_ids", "attention_mask", "labels"} for batch in whole)
        assert all(torch.equal(a["labels"], b["labels"]) for a, b in zip(whole, parts, strict=True))
        assert all(batch.keys() == {"labels"} for batch in parts)
    wrapped = prepared_loader(tmp_path, in_memory, collate).collate_fn
    assert columns_read(wrapped, ("labels", "text")) == {
        "label",
        "label_ids",
        "labels",
        "input_ids",
    }


def test_other_collators_get_whole_samples():
    collate = DataCollatorForLanguageModeling(tokenizer(), mlm=True)
    assert columns_read(collate, ("labels",)) is None
    assert columns_read(lambda samples: samples, ("labels",)) is None
    assert columns_read(default_collate, ("labels", "x")) == {"label", "label_ids", "labels", "x"}


def test_a_batch_without_a_wanted_column_is_refused():
    loader = share(plain_loader([{"input_ids": 1}]), columns=("input_ids", "labels"))
    with pytest.raises(DataError, match="reads column 'labels', but the batch has input_ids; add"):
        next(iter(loader))


@pytest.mark.parametrize("collate", [default_data_collator, default_collate])
def test_a_column_that_the_first_batch_lacks_is_refused(collate: Any) -> None:
    samples = [{"input_ids": 1}, {"input_ids": 1}, {"input_ids": 2, "weights": 3}]
    wanted, known = ("input_ids",), KnownColumns(frozenset(["input_ids"]), frozenset(["weights"]))
    loader = share(
        DataLoader(samples, 1, collate_fn=collate),  # type: ignore[arg-type]
        columns=wanted,
        known=known,
    )
    with pytest.raises(DataError, match="a batch has column 'weights', which the first batch"):
        list(loader)
    unread = share(DataLoader(samples, 1, collate_fn=default_data_collator), columns=wanted)  # type: ignore[arg-type]
    assert len(list(unread)) == 3  # a column that the model does not take


class Rows(list[Any]):
    """A dataset with an attribute of its own."""

    level = 1


@pytest.mark.parametrize("columns", [("input_ids",), ()])
def test_attributes_of_the_loaders_dataset_are_the_users(columns: tuple[str, ...]) -> None:
    rows = Rows([{"input_ids": 1}, {"input_ids": 2}])
    dataset: Any = share(plain_loader(rows), columns=columns).dataset
    assert dataset.level == 1
    dataset.level = 5
    assert rows.level == 5
    dataset.append({"input_ids": 3})
    assert len(dataset) == len(rows) == 3
    assert not hasattr(dataset, "other")
    assert copy.copy(dataset).level == 5


def test_a_batch_that_is_not_a_dict_is_refused():
    loader = share(plain_loader([(1, 2), (3, 4)]))
    with pytest.raises(DataError, match="gave a list, not a dict of columns"):
        next(iter(loader))


def test_a_missing_column_is_named():
    rows = padded_rows()
    with pytest.raises(
        DataError,
        match=r"needs column 'labels', but the batch has input_ids \(the dataset has input_ids, "
        r"attention_mask, label, text\); TakesAll.forward takes input_ids, labels, attention_mask",
    ):
        check_columns(["input_ids"], model=TakesAll(), needed=["labels"], dataset=rows)


def test_a_required_column_is_named():
    with pytest.raises(DataError, match="needs column 'input_ids', but the batch has labels;"):
        check_columns(["labels"], model=TakesAll())


def test_a_column_that_the_model_does_not_take_is_named():
    with pytest.raises(DataError, match=r"'text', which the model does not take; TakesAll.forward"):
        check_columns(["input_ids", "text"], model=TakesAll())
    check_columns(["input_ids", "text"], model=TakesAll(), also_taken=["text"])


def test_a_forward_that_takes_anything_takes_any_column():
    class Open(TakesAll):
        def forward(self, input_ids, **columns):
            raise NotImplementedError

    check_columns(["input_ids", "text"], model=Open())


def test_an_adapter_model_takes_what_its_base_takes():
    class Adapter(torch.nn.Module):
        def get_base_model(self):
            return TakesAll()

        def forward(self, *args, **kwargs):
            raise NotImplementedError

    with pytest.raises(DataError, match=r"TakesAll.forward takes input_ids"):
        check_columns(["input_ids", "text"], model=Adapter())


def test_emptiness():
    with pytest.raises(DataError, match="the evaluation dataset is empty"):
        check_not_empty([], "evaluation")
    check_not_empty([1])
    check_not_empty(iter([]))


def test_only_stored_samples_and_known_collators_draw_no_random_numbers():
    rows = datasets.Dataset.from_dict({"input_ids": [[1], [2]]})
    transformed = rows.with_transform(lambda batch: batch)
    assert not make_fetch(rows, default_data_collator, None, 5).may_draw
    assert not make_fetch(rows.with_format("torch"), default_collate, ("input_ids",), 5).may_draw
    assert make_fetch(transformed, default_data_collator, None, 5).may_draw
    assert make_fetch([{"input_ids": 1}], default_data_collator, None, 5).may_draw
    assert make_fetch(rows, lambda samples: {}, None, 5).may_draw
