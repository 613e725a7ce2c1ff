"""TRL's fused head of language models as plain operators, which a trace can shard.

TRL asks a model for log-probabilities of its labels, and for what its metrics read, through one
function that never holds the logits of all tokens (`ChunkedLogProbFunction`). It writes into
buffers, chunk by chunk. Traced, the same values are plain operators, which tensor parallelism runs
on shards of the vocabulary, and `merak.graph.chunked_rows` chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import nn
from trl.trainer import utils

LogProbs = tuple[
    torch.Tensor,
    torch.Tensor | None,
    torch.Tensor | None,
    torch.Tensor | None,
    torch.Tensor | None,
]


class PlainLogProbs:
    """Stands for TRL's `ChunkedLogProbFunction`, with the same arguments and results."""

    @staticmethod
    def apply(  # as TRL calls it, by position
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        outputs: Collection[str] = (),
    ) -> LogProbs:
        """Log-probabilities of targets, and what else is asked for.

        Args:
            hidden: inputs of the head, (tokens, width).
            weight: of the head, (vocabulary, width).
            bias: of the head, (vocabulary,), or None.
            targets: (tokens,), none of them negative.
            temperature: which logits are divided by.
            chunk_size: of TRL's function.
            softcap: beyond which logits do not grow; None for no such bound.
            logit_scale: which logits are multiplied by first.
            outputs: names of the results beside the first.

        Returns:
            Log-probabilities, entropy, log of the sum of squared probabilities, mean logit, and
            whether the target is the most likely; (tokens,), float32 and boolean.
        """
        if not torch.is_autocast_enabled(hidden.device.type):
            weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        logits = nn.functional.linear(hidden, weight, bias).float()
        if logit_scale != 1.0:
            logits = logits * logit_scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if temperature != 1.0:
            logits = logits / temperature
        each = torch.log_softmax(logits, -1)
        entropy = squares = mean = is_top = None
        if "entropy" in outputs:
            entropy = -(each.exp() * each).sum(-1)
        fixed = each.detach()
        if "log_sum_sq_probs" in outputs:
            squares = torch.logsumexp(2 * fixed, -1)
        if "mean_logits" in outputs:
            mean = logits.detach().mean(-1)
        if "is_top1" in outputs:
            is_top = fixed.argmax(-1) == targets
        return each.gather(-1, targets[:, None])[:, 0], entropy, squares, mean, is_top


@contextmanager
def plain_head() -> Iterator[None]:
    """Context in which TRL's fused heads are plain operators over all positions."""
    with (
        mock.patch.object(utils, "_ChunkedLogProbFunction", PlainLogProbs),
        # Else it picks the positions with labels, so that sizes depend on values.
        mock.patch.object(utils, "_use_triton", lambda device: False),
    ):
        yield
