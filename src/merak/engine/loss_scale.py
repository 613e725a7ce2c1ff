"""The loss scale of fp16: a factor that keeps small gradients from vanishing, as training finds it.

The loss's gradient is multiplied by it before the backward, and all gradients are divided by it
before their norm is taken. That norm is over all axes, so every rank sees an overflow alike: all
skip the same steps and go on with the same scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_SKIPPED_STEPS = 10
"""So many steps in a row may be skipped for a loss or gradient that is not finite."""


@dataclass(slots=True)
class LossScale:
    """A factor that falls after an overflow and grows after many steps without one.

    Args:
        scale: the factor.
        growth_factor: multiplies it when it grows.
        backoff_factor: multiplies it after an overflow.
        growth_interval: it grows after so many steps in a row without an overflow.
        num_good_steps: the steps since it last changed.
        num_vain_steps: the steps in a row that overflowed though the scale was 1 or less.

    Source: the rule and its constants are `torch.amp.GradScaler`'s.
    """

    scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    num_good_steps: int = 0
    num_vain_steps: int = 0

    @property
    def may_overflow(self) -> bool:
        """Whether the scale can be why a gradient is not finite; below 1 the step itself is."""
        return self.scale > 1.0

    def update(self, overflow: bool) -> None:
        """Learn from a step.

        Args:
            overflow: whether a gradient on any rank was infinite or NaN.
        """
        self.num_vain_steps = self.num_vain_steps + 1 if overflow and not self.may_overflow else 0
        if overflow:
            self.scale *= self.backoff_factor
            self.num_good_steps = 0
            return
        self.num_good_steps += 1
        if self.num_good_steps == self.growth_interval:
            self.scale *= self.growth_factor
            self.num_good_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """What goes into a checkpoint, as `torch.amp.GradScaler` names it."""
        return {
            "scale": self.scale,
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": self.num_good_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.scale = float(state["scale"])
        self.growth_factor = float(state["growth_factor"])
        self.backoff_factor = float(state["backoff_factor"])
        self.growth_interval = int(state["growth_interval"])
        self.num_good_steps = int(state["_growth_tracker"])
