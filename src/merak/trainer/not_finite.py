"""Training steps whose loss or gradient is NaN or infinite: skipped, counted, logged, or the end.

Every rank knows the same losses and the same gradient norm, so all of them decide alike.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field

import torch

from merak.arguments import MerakArguments
from merak.core.errors import TrainingError
from merak.core.rank0 import warn_on_rank0
from merak.engine.loss_scale import LossScale

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class SkippedSteps:
    """Counts the training steps that were left out, and says what a log then shows.

    Args:
        scaler: the loss scale of fp16, whose overflows are no fault of the model; None without.
    """

    scaler: LossScale | None
    # Steps that were left out one after another; overflows of the loss scale are not counted.
    _num_in_a_row: int = field(default=0, init=False)
    # Whether a step was skipped, or had a finite loss, since the last log; and since the start.
    _window_has_skip: bool = field(default=False, init=False)
    _window_is_finite: bool = field(default=False, init=False)
    _any_is_finite: bool = field(default=False, init=False)
    _last: float = field(default=math.nan, init=False)

    def start(self) -> None:
        """Begin a run of training."""
        self._num_in_a_row = 0
        self._window_has_skip = self._window_is_finite = self._any_is_finite = False

    def skips(
        self, args: MerakArguments, step: int, losses: torch.Tensor, norm: torch.Tensor
    ) -> bool:
        """Whether a training step is to be left out.

        Args:
            args: what the job asks for: `nan_policy` and `max_skipped_steps`.
            step: its number, from 1.
            losses: of its microbatches.
            norm: of its gradients.

        Raises:
            TrainingError: training cannot go on.
        """
        is_finite = bool(torch.isfinite(norm) & torch.isfinite(losses).all())
        is_overflow = not is_finite and self.scaler is not None and self.scaler.may_overflow
        if self.scaler is not None:
            self.scaler.update(overflow=not is_finite)
        if is_finite:
            self._num_in_a_row = 0
            self._window_is_finite = self._any_is_finite = True
            return False
        self._window_has_skip = True
        self._last = float(losses.sum())
        found = f"loss {self._last} and gradient norm {float(norm)}"
        if not is_overflow:
            self._count(args, step, found)
        # A loss scale that was too high says nothing of the loss, which may be finite.
        finite_loss = bool(torch.isfinite(losses).all())
        self._window_is_finite |= finite_loss
        self._any_is_finite |= finite_loss
        warn_on_rank0(logger, "step %d skipped: %s", step, found)
        return True

    def _count(self, args: MerakArguments, step: int, found: str) -> None:
        if args.nan_policy == "stop":
            raise TrainingError(
                f"step {step} has {found}; lower the learning rate or look at its data, or leave "
                "such steps out with nan_policy='skip'."
            )
        self._num_in_a_row += 1
        if self._num_in_a_row > args.max_skipped_steps:
            raise TrainingError(
                f"step {step} has {found}, and the {self._num_in_a_row - 1} steps before it were "
                "skipped too, so the model has diverged; go on from an earlier checkpoint with a "
                "lower learning rate, look at the data, or raise "
                f"max_skipped_steps={args.max_skipped_steps}."
            )

    def logged(self, logs: dict[str, float]) -> None:
        """Put the last loss, NaN or infinite, in the place of a mean of which none was finite.

        transformers leaves such losses out of its sum, which is then 0.
        """
        if "loss" in logs:
            if self._window_has_skip and not self._window_is_finite:
                logs["loss"] = self._last
            self._window_has_skip = self._window_is_finite = False

    def total(self, known: float) -> float:
        """The sum of a run's losses that are finite; NaN if there is none.

        Args:
            known: what transformers' loop has as the sum.
        """
        if not self._any_is_finite:
            return math.nan
        return 0.0 if math.isnan(known) else known
