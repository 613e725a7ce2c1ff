"""Refusals of second backwards and optimizer steps in a script's loop, since `step` does both.

A second step of the optimizer would pass without a word, and torch's own errors of a backward and
of a loss scale blame what is right.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch

from merak.core.errors import TrainingError
from merak.engine.optimizer.connection import OptimizerConnections

_all: weakref.WeakSet[OptimizerConnections] = weakref.WeakSet()

_DONE = (
    "step() of merak.parallelize has run the backward of its batch, and returns the loss as a "
    "number without gradients; remove backward(), and the GradScaler, if there is one, with its "
    "scale, unscale_, step and update (autocast=torch.float16 brings a loss scale of its own)."
)


def refuse_second_steps(
    connections: OptimizerConnections,
    optimizer: torch.optim.Optimizer | None,
    is_stepping: Callable[[], bool],
) -> None:
    """Refuse a second backward, optimizer step or gradient scaler behind `step`, which does them.

    Args:
        connections: of the engine that it trains.
        optimizer: of this rank that `step` steps; None for none.
        is_stepping: whether `step` is stepping it.
    """

    def before_step(*_: Any) -> None:
        if not is_stepping():
            raise TrainingError(
                "step() of merak.parallelize has stepped the optimizer that it was given; remove "
                "this second step(), or leave out the optimizer=… of merak.parallelize."
            )

    if optimizer is not None:
        optimizer.register_step_pre_hook(before_step)
    _all.add(connections)
    _explain_errors()


@cache
def _explain_errors() -> None:
    """Let torch's methods that `step` makes superfluous say so, once in a process."""
    _explain(torch.Tensor, "backward", RuntimeError)
    for name in ("step", "unscale_", "update"):
        _explain(torch.amp.GradScaler, name, AssertionError)


def _explain(holder: type, name: str, expected: type[Exception]) -> None:
    original = getattr(holder, name)

    @wraps(original)
    def explained(self: Any, *given: Any, **named: Any) -> Any:
        if isinstance(self, torch.amp.GradScaler) and self.is_enabled():
            optimizers = (one for one in given if isinstance(one, torch.optim.Optimizer))
            if any(connections.steps(one) for one in optimizers for connections in _all):
                raise TrainingError(_DONE)
        try:
            return original(self, *given, **named)
        except expected as error:
            if not _all or getattr(self, "requires_grad", False):
                raise
            raise TrainingError(_DONE) from error

    setattr(holder, name, explained)
