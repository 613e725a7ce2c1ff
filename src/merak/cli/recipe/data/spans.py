"""Span corruption, by which T5 and its kind are trained on text: gaps that the decoder fills."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedTokenizerBase

from merak.cli.recipe.data.tokenizer import sentinel
from merak.core.errors import CommandError

Lengths = npt.NDArray[np.int64]


class SpanCorruption:
    """Collator that replaces random spans by sentinels, and makes of the spans the labels.

    All batches have one shape: so many tokens and spans are removed as the sample's length says.

    Source: arXiv 1910.10683, section 3.1.4.

    Args:
        tokenizer: with sentinels (`<extra_id_0>`, …) and an end token.
        probability: fraction of the tokens that are removed.
        mean_span: mean length of a removed span, in tokens.
        start: token that the decoder begins with.

    Raises:
        CommandError: the tokenizer has no sentinels, or no end token.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        probability: float,
        mean_span: float,
        start: int,
    ) -> None:
        ids = tokenizer.get_vocab()
        if sentinel(0) not in ids or tokenizer.eos_token_id is None:
            raise CommandError(
                "span corruption needs a tokenizer with an end token and with sentinels such as "
                f"{sentinel(0)}; take data.tokenizer: train, or the tokenizer of T5."
            )
        self._end = int(tokenizer.eos_token_id)
        self._start = start
        self._probability = probability
        self._mean_span = mean_span
        self._sentinels = [ids[name] for name in map(sentinel, range(len(ids))) if name in ids]

    def __call__(self, samples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Make a batch of samples with `input_ids` of one length."""
        pairs = [self.corrupt(np.asarray(sample["input_ids"])) for sample in samples]
        inputs, labels = (torch.from_numpy(np.stack(column)) for column in zip(*pairs))
        # The decoder reads the labels one step later, behind its start token.
        start = torch.full_like(labels[:, :1], self._start)
        return {
            "input_ids": inputs,
            "labels": labels,
            "decoder_input_ids": torch.cat((start, labels[:, :-1]), dim=1),
        }

    def corrupt(
        self, ids: npt.NDArray[np.integer[Any]]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Remove spans of a sample, drawn from NumPy's global random state.

        Args:
            ids: (sequence,).

        Returns:
            The inputs and the labels, each with an end token.

        Raises:
            CommandError: the tokenizer has fewer sentinels than there are spans.
        """
        num_removed = min(max(round(len(ids) * self._probability), 1), len(ids) - 1)
        num_spans = max(round(num_removed / self._mean_span), 1)
        num_spans = min(num_spans, len(ids) - num_removed)
        if num_spans > len(self._sentinels):
            raise CommandError(
                f"a sample of {len(ids)} tokens has {num_spans} removed spans, but the tokenizer "
                f"has {len(self._sentinels)} sentinels; raise data.mean_span, or lower "
                "data.sequence."
            )
        removed = _partition(num_removed, num_spans)
        kept = _partition(len(ids) - num_removed, num_spans)
        inputs: list[int] = []
        labels: list[int] = []
        begin = 0
        for mark, num_kept, num_gone in zip(self._sentinels, kept, removed):
            inputs += [*ids[begin : begin + num_kept], mark]
            begin += num_kept
            labels += [mark, *ids[begin : begin + num_gone]]
            begin += num_gone
        return (
            np.array([*inputs, self._end], np.int64),
            np.array([*labels, self._end], np.int64),
        )


def _partition(total: int, parts: int) -> Lengths:
    """Draw the lengths of parts, at least 1 each, that add up to a total."""
    cuts = np.sort(np.random.permutation(total - 1)[: parts - 1]) + 1
    return np.diff(np.concatenate(([0], cuts, [total]))).astype(np.int64)
