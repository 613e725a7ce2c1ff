"""Training steps whose loss or gradient is not finite: located, skipped, logged, or refused.

Every rank knows the same losses and the same gradient norm, so all of them decide the same.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from merak.arguments import MerakArguments
from merak.core.errors import TrainingError
from merak.core.rank0 import warn_on_rank0
from merak.engine.step.optimizer_step import FiniteCheck, StepNumbers

logger = logging.getLogger(__name__)

PERSISTENT_OVERFLOWS = 8
"""So many contiguous overflows of fp16's loss scale are located, though a lower scale may do."""

Locate = Callable[[], str]
"""Finds where a step was first not finite: the end of a sentence, or nothing."""


class StepLoss(torch.Tensor):
    """A finite loss, of which transformers' loop need not ask whether it is.

    The loop asks twice a microbatch, and the host would wait for a GPU each time. So a loss that is
    not finite is replaced on the device, by what the loop would add instead.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer what the loop asks, and compute with a plain tensor."""
        if func in (torch.isnan, torch.isinf):
            return False
        with torch._C.DisableTorchFunctionSubclass():
            own, named = tree_map_only(
                cls, lambda loss: loss.as_subclass(torch.Tensor), (args, kwargs or {})
            )
            return func(*own, **named)


class LearningRates:
    """The learning rates before a step, whose scheduler moves on before it is known to be finite.

    Args:
        scheduler: of the optimizer.
        optimizer: whose groups have the rates.
    """

    def __init__(self, scheduler: Any, optimizer: torch.optim.Optimizer | None) -> None:
        self._scheduler = scheduler
        self._state = copy.deepcopy(scheduler.state_dict())
        self._groups = [] if optimizer is None else optimizer.param_groups
        self._values = [
            {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            for group in self._groups
        ]

    def restore(self) -> None:
        """Go back to them: the step has changed nothing, so it does not count."""
        self._scheduler.load_state_dict(self._state)
        for group, values in zip(self._groups, self._values, strict=True):
            for key, value in values.items():
                if isinstance(value, torch.Tensor):
                    group[key].copy_(value)  # others hold it, too
                else:
                    group[key] = value


def _nowhere() -> str:
    return ""


@dataclass(slots=True)
class SkippedSteps:
    """Skips training steps that are not finite, and corrects the losses that are then logged.

    Args:
        check: finds these steps.
    """

    check: FiniteCheck
    num_overflows: int = field(default=0, init=False)
    """Contiguous overflows of the loss scale."""
    found: str = field(default="", init=False)
    """The last step that was not finite, in words."""
    # Whether a step was skipped, or had a finite loss, since the last log; and since the start.
    _window_has_skip: bool = field(default=False, init=False)
    _window_is_finite: bool = field(default=False, init=False)
    _any_is_finite: bool = field(default=False, init=False)
    _last: float = field(default=math.nan, init=False)

    def start(self) -> None:
        """Begin a run of training."""
        self.check.num_failed = self.num_overflows = 0
        self._window_has_skip = self._window_is_finite = self._any_is_finite = False

    def skips(
        self,
        args: MerakArguments,
        step: int,
        numbers: StepNumbers,
        locate: Locate = _nowhere,
    ) -> bool:
        """Whether a training step must be skipped.

        Args:
            args: what the job asks for: `nan_policy`, `max_skipped_steps` and `max_rollbacks`.
            step: its number, from 1.
            numbers: at its end.
            locate: finds where the step was first not finite; all ranks call it together.

        Raises:
            TrainingError: training cannot go on.
        """
        if not self.check.fails(numbers):
            self._window_is_finite = self._any_is_finite = True
            self.num_overflows = 0
            return False
        self._window_has_skip = True
        self._last = numbers.loss
        found = f"loss {numbers.loss} and gradient norm {numbers.norm}"
        self.num_overflows += self.check.is_overflow
        if not self.check.is_overflow or self.num_overflows == PERSISTENT_OVERFLOWS:
            found += locate()
        if not self.check.is_overflow:
            self._refuse(args, step, found)
        # A loss scale that was too high says nothing of the loss, which may be finite.
        self._window_is_finite |= numbers.has_finite_loss
        self._any_is_finite |= numbers.has_finite_loss
        self.found = found
        if args.nan_policy != "rollback" or self.check.is_overflow:
            warn_on_rank0(logger, "step %d skipped: %s", step, found)
        return True

    def _refuse(self, args: MerakArguments, step: int, found: str) -> None:
        if args.nan_policy == "stop":
            raise TrainingError(
                f"step {step} has {found}; lower the learning rate or look at its data, or leave "
                "such steps out with nan_policy='skip'."
            )
        num_failed = self.check.num_failed
        if args.nan_policy == "skip" and num_failed > args.max_skipped_steps:
            raise TrainingError(
                f"step {step} has {found}, and the {num_failed - 1} steps before it were "
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
