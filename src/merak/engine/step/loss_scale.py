"""The loss scale of fp16: torch's own rule, fed with overflows of the norm over all ranks.

The loss's gradient is multiplied by the scale before the backward, and all gradients are divided by
it before their norm is taken. torch looks for overflows in the gradients of one rank's optimizer
(`GradScaler.unscale_`); the norm that is taken anyway is over all axes, so every rank sees the same
overflow, skips the same steps and goes on with the same scale, without another pass or message. The
scale lives on the device, where it is adapted and multiplied with: the host need not wait for it.
"""

from __future__ import annotations

from typing import Any

import torch

MAX_SKIPPED_STEPS = 10
"""So many contiguous steps may be skipped for a loss or gradient that is not finite."""


class LossScale(torch.amp.GradScaler):
    """A loss scale that falls after an overflow and grows after many steps without one.

    Args:
        device: of the engine.
        **options: of `torch.amp.GradScaler`, such as `init_scale` and `growth_interval`.
    """

    def __init__(self, device: torch.device | str = "cpu", **options: Any) -> None:
        super().__init__(torch.device(device).type, **options)
        self.scale(torch.zeros((), device=device))  # which makes its tensors

    def current(self) -> torch.Tensor:
        """The scale of the next step, a scalar on the device, which later steps do not change."""
        assert self._scale is not None
        return self._scale.clone()

    def adapt(self, overflow: torch.Tensor) -> None:
        """Adapt the scale to a step, on the device.

        Args:
            overflow: 1 if a gradient on any rank was infinite or NaN, else 0; a float32 scalar.
        """
        found = {overflow.device: overflow}
        self._per_optimizer_states[0]["found_inf_per_device"] = found
        self.update()
