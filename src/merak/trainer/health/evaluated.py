"""Losses of an evaluation that are not finite: the batches that have them are named."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch

from merak.core.rank0 import warn_on_rank0

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class FiniteLosses:
    """Looks at the losses of an evaluation, batch by batch."""

    _num_batches: int = field(default=0, init=False)
    _bad: list[tuple[int, float]] = field(default_factory=list, init=False)

    def add(self, loss: torch.Tensor | None, is_last: bool) -> None:
        """Look at the loss of the next batch, and warn on rank 0 after the last one.

        Args:
            loss: a scalar, or of each sample; None where there is none.
            is_last: whether it is the evaluation's last batch.
        """
        if loss is not None and not bool(torch.isfinite(loss).all()):
            self._bad.append((self._num_batches, float(loss.float().mean())))
        self._num_batches += 1
        if is_last and self._bad:
            first, value = self._bad[0]
            warn_on_rank0(
                logger,
                "the loss of %d of %d batches of an evaluation is not finite, so its mean is not; "
                "the first is batch %d (from 0), with %s: look at its samples, or at the model.",
                len(self._bad),
                self._num_batches,
                first,
                value,
            )
