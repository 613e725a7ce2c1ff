"""Former place of `measured_timeline`, which `merak.schedule` exports."""

from __future__ import annotations

import warnings

from merak.schedule.simulator.timeline import measured_timeline

__all__ = ["measured_timeline"]

warnings.warn(
    "merak.schedule.timeline has moved; import measured_timeline from merak.schedule.",
    DeprecationWarning,
    stacklevel=2,
)
