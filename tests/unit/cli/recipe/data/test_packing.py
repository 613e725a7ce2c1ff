"""Samples of one length from documents, conversations and spans."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from merak.cli.recipe.data.conversations import encoder
from merak.cli.recipe.data.isolation import keeps_documents_apart
from merak.cli.recipe.data.losses import mean_over_labels
from merak.cli.recipe.data.packing import (
    IGNORED,
    Document,
    documents_behind_another,
    one_document_each,
    whole_documents,
)
from merak.cli.recipe.data.spans import SpanCorruption
from merak.cli.recipe.data.tokenizer import sentinel, train_tokenizer, with_template
from merak.cli.recipe.schema import CHATML, DataRecipe, ModelRecipe
from merak.core.errors import CommandError
from merak.zoo.model_source import resolve_model

ASKED = {"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]}


def document(*ids: int) -> Document:
    return Document(np.array(ids, np.int32), np.array(ids, np.int32))


def test_documents_are_cut_where_a_sample_ends() -> None:
    documents = [document(1, 2, 3), document(4, 5, 6, 7, 8), document(9)]
    joined, other = documents_behind_another(documents, 4, separate=False)
    assert joined["input_ids"].tolist() == [1, 2, 3, 4]
    assert other["input_ids"].tolist() == [5, 6, 7, 8] and "position_ids" not in other
    apart, _ = documents_behind_another(documents, 4, separate=True)
    assert apart["position_ids"].tolist() == [0, 1, 2, 0]
    assert apart["labels"].tolist() == [IGNORED, 2, 3, IGNORED]


def test_whole_documents_share_samples() -> None:
    documents = [document(1, 2, 3), document(4, 5), document(6), document(7, 8, 9, 10, 11)]
    full, cut, rest = whole_documents(documents, 4, separate=True, pad=0)
    assert full["input_ids"].tolist() == [1, 2, 3, 6]
    assert cut["input_ids"].tolist() == [7, 8, 9, 10]
    assert rest["input_ids"].tolist() == [4, 5, 0, 0]
    assert rest["labels"].tolist() == [IGNORED, 5, IGNORED, IGNORED]
    assert rest["position_ids"].tolist() == [0, 1, 0, 1]


def test_one_document_a_sample() -> None:
    (sample,) = one_document_each([document(1, 2)], 3, pad=9, masked=True)
    assert {name: column.tolist() for name, column in sample.items()} == {
        "input_ids": [1, 2, 9],
        "labels": [1, 2, IGNORED],
        "attention_mask": [1, 1, 0],
    }


@pytest.mark.parametrize(
    "record",
    [
        ASKED,
        {"conversations": [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]},
        {"prompt": "1+1?", "completion": "2"},
        {"instruction": "1+1?", "output": "2", "input": ""},
    ],
)
def test_answers_alone_are_labels(record: dict[str, object]) -> None:
    tokenizer = train_tokenizer(["1+1? 2 user assistant"] * 9, 300)
    with_template(tokenizer, DataRecipe(chat_template=CHATML))
    made = encoder(tokenizer, prompt_loss=False)(record)
    text = tokenizer.decode(made.input_ids)
    assert text == ("<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n")
    assert tokenizer.decode(made.labels[made.labels != IGNORED]) == "2<|im_end|>\n"
    whole = encoder(tokenizer, prompt_loss=True)(record)
    assert whole.labels.tolist() == made.input_ids.tolist()


def test_prompts_without_a_template_end_with_the_end_token() -> None:
    tokenizer = train_tokenizer(["one two"] * 9, 300)
    made = encoder(tokenizer, prompt_loss=False)({"prompt": "one ", "completion": "two"})
    assert tokenizer.decode(made.input_ids) == "one two<|endoftext|>"
    assert tokenizer.decode(made.labels[made.labels != IGNORED]) == " two<|endoftext|>"
    with pytest.raises(CommandError, match=r"has no chat template.*data\.chat_template"):
        encoder(tokenizer, prompt_loss=False)(ASKED)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"text": "x"}, "a record has the fields text, of which none holds a conversation"),
        ({"messages": "hello"}, "a conversation is 'hello'; give a list of messages"),
        ({"messages": [{"role": "sage", "content": "x"}]}, "a message is .*sage.*give a role"),
        ({"messages": [{"role": "user", "content": "x"}]}, "has no answer to learn"),
    ],
)
def test_wrong_conversations(record: dict[str, object], said: str) -> None:
    tokenizer = train_tokenizer(["one two"] * 9, 300)
    with_template(tokenizer, DataRecipe(chat_template=CHATML))
    with pytest.raises(CommandError, match=said):
        encoder(tokenizer, prompt_loss=False)(record)


def test_removed_spans_are_the_labels() -> None:
    tokenizer = train_tokenizer(["one two"] * 9, 400, sentinels=True)
    marks = [tokenizer.convert_tokens_to_ids(sentinel(i)) for i in range(100)]
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    ids = np.arange(200, 300)
    collate = SpanCorruption(tokenizer, 0.15, 3.0, pad)
    np.random.seed(0)
    batch = collate([{"input_ids": ids}] * 3)
    assert len({tuple(row.tolist()) for row in batch["input_ids"]}) == 3
    for row in range(3):
        inputs, labels = batch["input_ids"][row].tolist(), batch["labels"][row].tolist()
        assert inputs[-1] == labels[-1] == end and len(labels) == 15 + 5 + 1
        assert batch["decoder_input_ids"][row].tolist() == [pad, *labels[:-1]]
        spans: dict[int, list[int]] = {}
        for token in labels[:-1]:
            if token in marks:
                span = spans.setdefault(token, [])
            else:
                span.append(token)
        restored = [x for token in inputs[:-1] for x in spans.get(token, [token])]
        assert restored == ids.tolist()
    with pytest.raises(CommandError, match="span corruption needs a tokenizer with an end token"):
        SpanCorruption(train_tokenizer(["one"], 300), 0.15, 3.0, 0)


def test_losses_of_microbatches_add_up_to_the_mean() -> None:
    logits, labels = torch.randn(4, 5, 7), torch.randint(7, (4, 5))
    labels[0, :3] = IGNORED
    count = int((labels != IGNORED).sum())

    class Outputs:
        def __init__(self, rows: slice) -> None:
            self.logits = logits[rows]

    parts = [slice(0, 1), slice(1, 4)]
    total = sum(mean_over_labels(Outputs(part), labels[part], count) for part in parts)
    torch.testing.assert_close(total, mean_over_labels(Outputs(slice(None)), labels))


@pytest.mark.parametrize(
    ("name", "apart"),
    [("GPT2LMHeadModel", True), ("LlamaForCausalLM", True), ("BloomForCausalLM", False)],
)
def test_models_that_keep_documents_apart(name: str, apart: bool) -> None:
    state = torch.random.get_rng_state()
    assert keeps_documents_apart(resolve_model(name), ModelRecipe(name)) is apart
    assert torch.equal(torch.random.get_rng_state(), state)
