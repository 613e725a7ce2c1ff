"""The loss scale of fp16: torch's own rule, fed with overflows of the norm over all ranks.

The loss's gradient is multiplied by the scale before the backward, and all gradients are divided by
it before their norm is taken. torch looks for overflows in the gradients of one rank's optimizer
(`GradScaler.unscale_`); the norm that is taken anyway is over all axes, so every rank sees the same
overflow, skips the same steps and goes on with the same scale, without another pass or message.
"""

from __future__ import annotations

from typing import Any

import torch

MAX_SKIPPED_STEPS = 10
"""So many contiguous steps may be skipped for a loss or gradient that is not finite."""


class LossScale(torch.amp.GradScaler):
    """A loss scale that falls after an overflow and grows after many steps without one.

    Args:
        **options: of `torch.amp.GradScaler`, such as `init_scale` and `growth_interval`.
    """

    def __init__(self, **options: Any) -> None:
        # On the host, whatever the engine's device: nothing waits for a device to read the scale.
        super().__init__("cpu", **options)
        self.scale(torch.zeros(()))  # which makes its tensors

    @property
    def may_overflow(self) -> bool:
        """Whether a lower scale may avoid an overflow; at 1 or less the step is to blame."""
        return self.get_scale() > 1.0

    def adapt(self, overflow: bool) -> None:
        """Adapt the scale to a step.

        Args:
            overflow: whether a gradient on any rank was infinite or NaN.
        """
        found = {torch.device("cpu"): torch.tensor(float(overflow))}
        self._per_optimizer_states[0]["found_inf_per_device"] = found
        self.update()
