"""Counts of tokens: label tokens that a loss is divided by, and input tokens of throughput."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from merak.core.tensor_meta import TensorMeta
from merak.data import BatchSignature, signature
from merak.data.objects import OBJECTS

TOKENS = "num_items_in_batch"
"""The column that transformers' loss functions divide by: label tokens of the whole step."""


@dataclass(frozen=True, slots=True)
class TokenCounter:
    """Counts the tokens of a microbatch, as far as a rank reads it.

    Args:
        count_labels: label tokens of a batch, as transformers counts them; None for a loss that is
            a mean over its own microbatch.
        main_input: the column whose elements are input tokens.
        pad_token: what padding is filled with, where it is known.
    """

    count_labels: Callable[[Mapping[str, Any]], int | None] | None
    main_input: str
    pad_token: int | None

    def counts(self, columns: Iterable[str]) -> bool:
        """Whether the loss of a batch with these columns takes a count of label tokens."""
        return self.count_labels is not None and "labels" in columns

    def counts_tokens(self, batch: Mapping[str, Any]) -> bool:
        """Whether the elements of a batch's main input are tokens, and not pixels or samples."""
        inputs = batch.get(self.main_input)
        return isinstance(inputs, torch.Tensor) and not inputs.is_floating_point()

    def signature(self, batch: Mapping[str, Any]) -> BatchSignature:
        """The signature of a whole batch, with the count's column where the loss takes it."""
        return self.with_tokens(signature(batch))

    def with_tokens(self, found: BatchSignature) -> BatchSignature:
        """A signature with the count's column where the loss takes it."""
        if not self.counts(name for name, meta in found.columns if meta.dtype is not OBJECTS):
            return found
        return BatchSignature((*found.columns, (TOKENS, TensorMeta((), torch.float32))))

    def to_read(self, columns: Iterable[str]) -> tuple[str, ...]:
        """Dataset columns for the columns that a program reads: labels for their count."""
        return tuple(dict.fromkeys("labels" if c == TOKENS else c for c in columns))

    def metadata(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Counts of a microbatch's tokens, by kind, as far as this rank reads it."""
        found: dict[str, int] = {}
        if self.counts(name for name, column in batch.items() if column.dtype is not OBJECTS):
            assert self.count_labels is not None
            labels = self.count_labels(batch)
            if labels is not None:
                found["labels"] = labels
        if self.main_input in batch:
            inputs = batch[self.main_input]
            found["inputs"] = inputs.numel()
            found["non_padding"] = self._non_padding(batch, inputs)
        return found

    def _non_padding(self, batch: Mapping[str, torch.Tensor], inputs: torch.Tensor) -> int:
        if "attention_mask" in batch:
            return int(batch["attention_mask"].sum())
        if self.pad_token is not None:
            return int((inputs != self.pad_token).sum())
        return inputs.numel()

    def warn_of_padding(self, kind: object, batch: Mapping[str, Any]) -> None:
        """Warn, as transformers does, that padding is counted as input tokens.

        Args:
            kind: `include_num_input_tokens_seen`.
            batch: one of the training's.
        """
        knows = "attention_mask" in batch or self.pad_token is not None
        if str(kind) == "non_padding" and self.main_input in batch and not knows:
            logging.getLogger("transformers.trainer").warning(
                "Could not determine method to count non-padding tokens, so that "
                "num_input_tokens_seen has all of them; give an attention_mask, or a "
                "processing_class with a pad_token_id."
            )
