"""Packing: samples of one length from documents of any length.

Samples have `input_ids` and `labels`; where documents are separate also `position_ids`, which begin
anew with each document, so that models of transformers keep attention inside of it; and padded ones
`attention_mask`, where the model needs to be told.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
Sample = dict[str, Ids]

IGNORED = -100
"""Label of a token that does not count in the loss."""

_OPEN_SAMPLES = 64
"""Samples that records are still put into."""


@dataclass(frozen=True, slots=True)
class Document:
    """Tokens of one document.

    Args:
        input_ids: (tokens,).
        labels: (tokens,): the same tokens, or `IGNORED` where they do not count in the loss.
    """

    input_ids: Ids
    labels: Ids


def documents_behind_another(
    documents: Iterable[Document], sequence: int, separate: bool
) -> Iterator[Sample]:
    """Concatenate documents and cut them into whole samples; a rest that fills none is left out.

    Args:
        documents: each with its end token.
        sequence: tokens of a sample.
        separate: whether attention is to stay inside a document. Then its first token is no label,
            since nothing in front of it predicts it.
    """
    waiting: list[Document] = []
    num_waiting = 0
    for document in documents:
        waiting.append(document)
        num_waiting += len(document.input_ids)
        while num_waiting >= sequence:
            taken, waiting = _cut(waiting, sequence)
            num_waiting -= sequence
            yield _joined(taken, separate)


def _cut(documents: list[Document], sequence: int) -> tuple[list[Document], list[Document]]:
    """Take the first tokens of documents; the last of them may be cut in two."""
    taken: list[Document] = []
    for index, document in enumerate(documents):
        missing = sequence - sum(len(d.input_ids) for d in taken)
        if len(document.input_ids) > missing:
            head = Document(document.input_ids[:missing], document.labels[:missing])
            tail = Document(document.input_ids[missing:], document.labels[missing:])
            return [*taken, *([head] if missing else [])], [tail, *documents[index + 1 :]]
        taken.append(document)
    return taken, []


def whole_documents(
    documents: Iterable[Document], sequence: int, separate: bool, pad: int
) -> Iterator[Sample]:
    """Fill samples with documents that are not cut, each where it leaves the least room.

    Args:
        documents: those of more tokens than a sample lose their end.
        sequence: tokens of a sample.
        separate: as of `documents_behind_another`.
        pad: token behind the last document of a sample.
    """
    open_samples: list[tuple[int, list[Document]]] = []  # tokens that are left, and what is in it
    for document in documents:
        size = min(len(document.input_ids), sequence)
        fitting = [index for index, (room, _) in enumerate(open_samples) if room >= size]
        if fitting:
            room, inside = open_samples.pop(min(fitting, key=lambda i: open_samples[i][0]))
        else:
            room, inside = sequence, []
        inside.append(document)
        if room == size:
            yield _padded(inside, sequence, separate, pad)
        else:
            open_samples.append((room - size, inside))
        if len(open_samples) > _OPEN_SAMPLES:
            fullest = min(range(len(open_samples)), key=lambda i: open_samples[i][0])
            yield _padded(open_samples.pop(fullest)[1], sequence, separate, pad)
    for _, inside in open_samples:
        yield _padded(inside, sequence, separate, pad)


def one_document_each(
    documents: Iterable[Document], sequence: int, pad: int, masked: bool
) -> Iterator[Sample]:
    """Make one sample of each document, cut or padded behind its end.

    Args:
        documents: what is read.
        sequence: tokens of a sample.
        pad: token of the padding.
        masked: whether samples have an attention mask. Causal models need none: no token sees the
            padding behind it.
    """
    for document in documents:
        sample = _padded([document], sequence, False, pad)
        if masked:
            count = min(len(document.input_ids), sequence)
            sample["attention_mask"] = (np.arange(sequence) < count).astype(np.int32)
        yield sample


def _padded(documents: list[Document], sequence: int, separate: bool, pad: int) -> Sample:
    used = [Document(d.input_ids[:sequence], d.labels[:sequence]) for d in documents]
    missing = sequence - sum(len(d.input_ids) for d in used)
    if missing:
        padding = np.full(missing, pad, np.int32), np.full(missing, IGNORED, np.int32)
        used.append(Document(*padding))
    return _joined(used, separate)


def _joined(documents: list[Document], separate: bool) -> Sample:
    sample = {
        "input_ids": np.concatenate([d.input_ids for d in documents]),
        "labels": np.concatenate([d.labels for d in documents]),
    }
    if separate:
        lengths = [len(d.input_ids) for d in documents]
        sample["position_ids"] = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
        sample["labels"][sample["position_ids"] == 0] = IGNORED
    return sample
