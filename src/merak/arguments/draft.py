"""Arguments of a job whose ranks are not there yet."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch

from merak.arguments.training import MerakArguments
from merak.core.mesh import current_mesh


@dataclass(repr=False)
class DraftArguments(MerakArguments):
    """Arguments that are checked like those of every rank, without touching a device.

    The process that starts the ranks would otherwise hold memory of the first one's GPU.

    Raises:
        ArgumentsError: an argument cannot be honoured.
    """

    looks_at_device: ClassVar[bool] = False

    @cached_property
    def _setup_devices(self) -> torch.device:
        """Return the device of the planned mesh."""
        self._n_gpu = 0
        return current_mesh().device
