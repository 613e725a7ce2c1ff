"""Encoding of records: their tokens, packed into samples of one length."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import datasets  # type: ignore[import-untyped]
import numpy as np
from transformers import PreTrainedTokenizerBase

from merak.cli.recipe.data.conversations import encoder
from merak.cli.recipe.data.objective import Objective
from merak.cli.recipe.data.packing import (
    IGNORED,
    Document,
    Sample,
    documents_behind_another,
    one_document_each,
    whole_documents,
)
from merak.cli.recipe.schema import CHAT, SEPARATE, UNPACKED, DataRecipe
from merak.core.errors import CommandError

ROWS_AT_ONCE = 1000
"""Records that are tokenized together."""

Rows = Iterable[Mapping[str, Any]]


@dataclass(slots=True)
class Counts:
    """Counts of encoded documents.

    Args:
        documents: all of them.
        cut: those that are longer than a sample and lose their end.
        without_labels: those that have no answer inside a sample, and are left out.
    """

    documents: int = 0
    cut: int = 0
    without_labels: int = 0


@dataclass(frozen=True, slots=True)
class Encoding:
    """Encoding of records as samples.

    Args:
        recipe: how they are packed, and where their text is.
        tokenizer: makes the tokens.
        objective: what the model is trained for.
        format: `text` or `chat`.
        packing: `separate`, `joined` or `none`.
    """

    recipe: DataRecipe
    tokenizer: PreTrainedTokenizerBase
    objective: Objective
    format: str
    packing: str

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns of a sample."""
        own = ["input_ids"]
        if self.objective is Objective.CAUSAL:
            own.append("labels")
        if self.packing == SEPARATE:
            own.append("position_ids")
        if self._is_masked:
            own.append("attention_mask")
        return tuple(own)

    @property
    def features(self) -> datasets.Features:
        """Types of the columns of a sample."""
        return datasets.Features(
            {name: datasets.List(datasets.Value("int32")) for name in self.columns}
        )

    @property
    def _is_masked(self) -> bool:
        return self.packing == UNPACKED and self.objective is not Objective.CAUSAL

    def samples(self, rows: Rows, counts: Counts) -> Iterator[Sample]:
        """Encode records, and pack them.

        Args:
            rows: the records.
            counts: what is counted on the way.

        Raises:
            CommandError: a record cannot be encoded.
        """
        size, separate = self.recipe.sequence, self.packing == SEPARATE
        documents = self._counted(self._documents(rows), counts)
        pad = _pad_token(self.tokenizer)
        if self.packing == UNPACKED:
            found = one_document_each(documents, size, pad, self._is_masked)
        elif self.format == CHAT:
            found = whole_documents(documents, size, separate, pad)
        else:
            found = documents_behind_another(documents, size, separate)
        for sample in found:
            yield {name: sample[name] for name in self.columns}

    def _documents(self, rows: Rows) -> Iterator[Document]:
        if self.format == CHAT:
            encode = encoder(self.tokenizer, self.recipe.prompt_loss)
            yield from map(encode, rows)
            return
        texts = texts_of(rows, self.recipe.column)
        end = _end_token(self.tokenizer)
        while some := list(itertools.islice(texts, ROWS_AT_ONCE)):
            encoded = self.tokenizer(
                some,
                add_special_tokens=False,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )
            for ids in encoded["input_ids"]:
                tokens = np.array([*ids, *end], dtype=np.int32)
                yield Document(tokens, tokens)

    def _counted(self, documents: Iterable[Document], counts: Counts) -> Iterator[Document]:
        size = self.recipe.sequence
        is_whole = self.packing == UNPACKED or self.format == CHAT
        for document in documents:
            if is_whole and (document.labels[:size] == IGNORED).all():
                counts.without_labels += 1
                continue
            counts.documents += 1
            counts.cut += is_whole and len(document.input_ids) > size
            yield document


def texts_of(rows: Rows, column: str) -> Iterator[str]:
    """Yield the texts of records; empty ones are left out.

    Args:
        rows: the records.
        column: that holds text.

    Raises:
        CommandError: a record has no such column.
    """
    for number, row in enumerate(rows, start=1):
        if column not in row:
            raise CommandError(
                f"record {number} of the data has no field {column!r}, only "
                f"{', '.join(map(str, row)) or 'none'}; set data.column to the field that holds "
                "the text, or mend the record."
            )
        if row[column]:
            yield str(row[column])


def _pad_token(tokenizer: PreTrainedTokenizerBase) -> int:
    found = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(int(token) for token in found if isinstance(token, int))


def _end_token(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    found = (tokenizer.eos_token_id, tokenizer.sep_token_id)
    return [token for token in found if isinstance(token, int)][:1]


# ---- parts of the records ----


def first_bytes(rows: Rows, column: str, limit: int | None) -> Iterator[Mapping[str, Any]]:
    """Yield records until they have so many bytes of text together.

    Args:
        rows: the records.
        column: that holds text; where a record has none, all of its fields count.
        limit: bytes; None for all records.
    """
    num_bytes = 0
    for row in rows:
        yield row
        if limit is None:
            continue
        texts = [row[column]] if column in row else row.values()
        num_bytes += sum(len(str(text).encode("utf-8", errors="replace")) for text in texts)
        if num_bytes >= limit:
            return


def every_nth(rows: Rows, every: int, held_out: bool) -> Iterator[Mapping[str, Any]]:
    """Yield every n-th record, or all others."""
    return (row for index, row in enumerate(rows) if (index % every == every - 1) is held_out)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Filter of records by their content, so that their order does not matter.

    Args:
        share: fraction of the records that are held out.
        held_out: whether these are taken, or all others.
    """

    share: float
    held_out: bool

    def __call__(self, row: Mapping[str, Any]) -> bool:
        """Whether a record is taken."""
        digest = zlib.crc32(repr(sorted(row.items())).encode("utf-8", errors="replace"))
        return (digest / 2**32 < self.share) is self.held_out


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """Encoding of some rows at once, as `datasets` maps them.

    Args:
        encoding: what makes samples of them.
        counts: what is counted on the way.
    """

    encoding: Encoding
    counts: Counts = field(default_factory=Counts)

    def __call__(self, rows: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        """Make samples; tokens behind the last whole sample are left out."""
        names = list(rows)
        # Of several datasets, each has columns of its own.
        records = (
            {name: value for name, value in zip(names, values) if value is not None}
            for values in zip(*rows.values())
        )
        samples = list(self.encoding.samples(records, self.counts))
        # Lists, of which a collator makes int64, as of rows that were prepared.
        columns = self.encoding.columns
        return {name: [sample[name].tolist() for sample in samples] for name in columns}
