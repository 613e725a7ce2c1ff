"""Exponential moving averages of parameters, one more state of what an optimizer steps.

Behind each update, what it has stepped is averaged: `average = decay * average + (1 - decay) *
parameter`, and behind the first one the average is the parameter itself, as
`torch.optim.swa_utils.AveragedModel` has it. Being states, averages are where the optimizer's
others are: sharded with them, in host memory or files with them, and in checkpoints. What a step
has no gradient of is not stepped, and its average stays.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from merak.checkpoint.optimizer_state import AVERAGE
from merak.core.gradients import is_low_precision


def keep_averages(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Average what an optimizer steps behind each of its steps.

    Args:
        optimizer: of any class.
        decay: the average's part of its next value, from 0 to below 1.
    """

    def average(own: torch.optim.Optimizer, *_: object) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            stepped = [t for group in own.param_groups for t in group["params"]]
            update_averages(own, [t for t in stepped if t.grad is not None], decay)

    optimizer.register_step_post_hook(average)


@torch.no_grad()
def update_averages(
    optimizer: torch.optim.Optimizer, stepped: Iterable[torch.Tensor], decay: float
) -> None:
    """Average tensors that an optimizer has just stepped.

    An average is at least of float32, also of a parameter that is not. A step that the device has
    left out (`found_inf`) leaves it, too.

    Args:
        optimizer: has the averages among its states, as `AVERAGE`.
        stepped: of its tensors.
        decay: as of `keep_averages`.
    """
    weight = 1.0 - decay
    left_out: torch.Tensor | None = getattr(optimizer, "found_inf", None)
    with torch._C.DisableTorchFunctionSubclass():
        averages: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for tensor in stepped:
            value, state = tensor.detach(), optimizer.state[tensor]
            dtype = torch.float32 if is_low_precision(value) else value.dtype
            if AVERAGE not in state:
                state[AVERAGE] = value.to(dtype, copy=True)
                continue
            averages.append(state[AVERAGE])
            values.append(value.to(dtype))
        if left_out is not None:
            for average, value in zip(averages, values, strict=True):
                average.lerp_(value, (weight * (1 - left_out)).to(average.dtype))
        elif averages:
            torch._foreach_lerp_(averages, values, weight)


def forget_averages(optimizer: torch.optim.Optimizer) -> None:
    """Drop the averages that an optimizer has been loaded with, where nothing goes on with them."""
    for state in optimizer.state.values():
        if isinstance(state, dict):
            state.pop(AVERAGE, None)
