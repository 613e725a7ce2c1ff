"""Conversations, and prompts with answers: records in the usual forms, as tokens and labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from merak.cli.recipe.data.packing import IGNORED, Document
from merak.core.errors import CommandError
from merak.zoo.hub import first_words

FORMS = (("messages",), ("conversations",), ("prompt", "completion"), ("instruction", "output"))
"""Columns of the forms of records that are known; `instruction` may have an `input` beside it."""

Message = Mapping[str, str]
Pieces = list[tuple[str, bool]]
"""Texts, and whether they are of an answer."""

ASSISTANT = "assistant"
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    "assistant": ASSISTANT,
    "model": ASSISTANT,
    "system": "system",
    "tool": "tool",
    "function": "tool",
}
"""Roles of records → those of chat templates."""


def is_chat(columns: Iterable[str]) -> bool:
    """Whether records with such columns are conversations, or prompts with answers."""
    return any(set(form) <= set(columns) for form in FORMS)


def check_chat(columns: Sequence[str], source: str) -> None:
    """Refuse records of no known form.

    Args:
        columns: of the records.
        source: as `data.source`.

    Raises:
        CommandError: they have none of the known columns; the message names those that they have.
    """
    if not is_chat(columns):
        forms = ", or ".join(" and ".join(form) for form in FORMS)
        raise CommandError(
            f"data.format='chat' needs the columns {forms}, but {source} has "
            f"{', '.join(columns) or 'none'}; rename them, or set another data.format."
        )


def encoder(
    tokenizer: PreTrainedTokenizerBase, prompt_loss: bool
) -> Callable[[Mapping[str, Any]], Document]:
    """Return what makes tokens and labels of a record.

    Args:
        tokenizer: with a chat template, unless all records are prompts and completions of text.
        prompt_loss: whether all tokens count in the loss, not only those of answers.

    Raises:
        CommandError: (by what is returned) the record is of no known form, or the template is.
    """

    def encode(record: Mapping[str, Any]) -> Document:
        pieces = _plain(record, tokenizer)
        if pieces is not None:
            return _with_ends(_document(pieces, tokenizer, prompt_loss), tokenizer, prompt_loss)
        return _document(
            _templated(_messages(record), tokenizer, prompt_loss), tokenizer, prompt_loss
        )

    return encode


def _document(pieces: Pieces, tokenizer: PreTrainedTokenizerBase, prompt_loss: bool) -> Document:
    """Tokens of all pieces together, so that they are those of the whole text."""
    encoded = tokenizer(
        "".join(text for text, _ in pieces),
        add_special_tokens=False,
        return_offsets_mapping=True,
        verbose=False,
    )
    ids = np.array(encoded["input_ids"], np.int32)
    starts, ends = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2).T
    counts = np.zeros(len(ids), bool) | prompt_loss
    begin = 0
    for text, is_answer in pieces:
        if is_answer:
            # A token that begins in the prompt, such as a space with a word, is learnt as well.
            counts |= (begin < ends) & (starts < begin + len(text))
        begin += len(text)
    return Document(ids, np.where(counts, ids, IGNORED).astype(np.int32))


def _plain(record: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> Pieces | None:
    """A prompt and a completion of text as they are, where no template says more."""
    prompt, completion = record.get("prompt"), record.get("completion")
    if tokenizer.chat_template or not (isinstance(prompt, str) and isinstance(completion, str)):
        return None
    return [(prompt, False), (completion, True)]


def _with_ends(
    document: Document, tokenizer: PreTrainedTokenizerBase, prompt_loss: bool
) -> Document:
    """Put the tokenizer's first token in front, and its end token behind."""
    start, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    ids, labels = [document.input_ids], [document.labels]
    if isinstance(start, int) and start != end:
        ids.insert(0, np.array([start], np.int32))
        labels.insert(0, np.array([start if prompt_loss else IGNORED], np.int32))
    if isinstance(end, int):
        ids.append(np.array([end], np.int32))
        labels.append(np.array([end], np.int32))
    return Document(np.concatenate(ids), np.concatenate(labels))


def _messages(record: Mapping[str, Any]) -> list[Message]:
    for name in ("messages", "conversations"):
        if record.get(name) is not None:
            return [_message(entry) for entry in _entries(record[name])]
    for name, answer in (("prompt", "completion"), ("instruction", "output")):
        if record.get(name) is not None and record.get(answer) is not None:
            question, answer_text = record[name], record[answer]
            if isinstance(question, str):
                more = record.get("input") if name == "instruction" else None
                text = f"{question}\n\n{more}" if more else question
                question = [{"role": "user", "content": text}]
            if isinstance(answer_text, str):
                answer_text = [{"role": ASSISTANT, "content": answer_text}]
            return [_message(entry) for entry in (*_entries(question), *_entries(answer_text))]
    raise CommandError(
        f"a record has the fields {', '.join(map(str, record)) or 'none'}, of which none holds a "
        "conversation; give messages, prompt and completion, or instruction and output."
    )


def _entries(found: Any) -> Iterable[Any]:
    if not isinstance(found, (list, tuple)) or not found:
        raise CommandError(
            f"a conversation is {str(found)[:80]!r}; give a list of messages, each with a role and "
            "a content."
        )
    return found


def _message(entry: Any) -> Message:
    if isinstance(entry, Mapping):
        role, content = (
            entry.get("role", entry.get("from")),
            entry.get("content", entry.get("value")),
        )
        if isinstance(content, str) and str(role).lower() in _ROLES:
            return {"role": _ROLES[str(role).lower()], "content": content}
    roles = ", ".join(dict.fromkeys(_ROLES.values()))
    raise CommandError(
        f"a message is {str(entry)[:80]!r}; give a role ({roles}) and a content of text."
    )


def _templated(
    messages: list[Message], tokenizer: PreTrainedTokenizerBase, prompt_loss: bool
) -> Pieces:
    """Text of a conversation by the template: of each answer what it adds to its prompt."""
    if not tokenizer.chat_template:
        raise CommandError(
            "the tokenizer has no chat template, by which conversations become text; set "
            "data.chat_template to a Jinja file or to 'chatml'."
        )
    if prompt_loss:
        return [(_text(messages, tokenizer, add_prompt=False), True)]
    pieces: Pieces = []
    done = ""
    for prompt, whole in _turns(messages):
        for part, is_answer in ((prompt, False), (whole, True)):
            text = _text(part, tokenizer, add_prompt=not is_answer)
            if not text.startswith(done):
                raise CommandError(
                    "the chat template changes what stands in front of an answer once the answer "
                    "is there, so that answers cannot be told from prompts; set "
                    "data.prompt_loss: true, or another data.chat_template."
                )
            pieces.append((text[len(done) :], is_answer))
            done = text
    return pieces


def _turns(messages: list[Message]) -> Iterator[tuple[list[Message], list[Message]]]:
    """Conversations up to each answer without and with it; what follows the last stays out."""
    answers = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]
    if not answers:
        raise CommandError(
            f"a conversation of {len(messages)} messages has no answer to learn; give one with the "
            "role assistant."
        )
    for index in answers:
        yield messages[:index], messages[: index + 1]


def _text(messages: list[Message], tokenizer: PreTrainedTokenizerBase, add_prompt: bool) -> str:
    if not messages:
        return ""
    try:
        own = [dict(message) for message in messages]
        text: Any = tokenizer.apply_chat_template(
            own, tokenize=False, add_generation_prompt=add_prompt
        )
    except Exception as cause:  # whatever a template may raise
        raise CommandError(
            f"the chat template refuses a conversation: {first_words(cause)}; mend the data, or "
            "set another data.chat_template."
        ) from cause
    return str(text)
