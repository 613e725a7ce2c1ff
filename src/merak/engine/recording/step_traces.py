"""Traces of chosen training steps, on every rank: torch's profiler, and a GPU's memory."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from merak.core.errors import ArgumentsError
from merak.core.mesh import Mesh

logger = logging.getLogger(__name__)

PROFILE_FOLDER = "profile"
"""Folder of Chrome traces, a file for each rank."""

MEMORY_FOLDER = "memory"
"""Folder of snapshots of GPUs' memory, a file for each rank."""

_MAX_ENTRIES = 1_000_000
"""The most allocations and frees that a snapshot goes back."""


def parse_steps(text: str) -> tuple[int, int]:
    """Read a range of steps.

    Args:
        text: as "3-5", or "3" for a single one; the first step of a training is 1.

    Returns:
        The first and the last.

    Raises:
        ArgumentsError: it is no such range.
    """
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    first, last = (0, 0) if found is None else (int(found[1]), int(found[2] or found[1]))
    if not 1 <= first <= last:
        raise ArgumentsError(
            f"profile_steps={text!r} is no range of steps; use '3-5' for steps 3 to 5, or '3', "
            "from 1 on."
        )
    return first, last


class StepTraces:
    """Traces of a range of steps of this rank, which never end a job by what cannot be written.

    Args:
        steps: the first and the last, from 1 on.
        folder: of the run.
        mesh: the grid of ranks.
    """

    def __init__(self, steps: tuple[int, int], folder: Path, mesh: Mesh) -> None:
        self._first, self._last = steps
        self._folder = folder
        self._mesh = mesh
        self._on_gpu = mesh.device.type == "cuda"
        self._profile: profile | None = None

    def begin_step(self, step: int) -> None:
        """Begin to trace, if a step is among those that are to be.

        Args:
            step: that begins, from 1 on.
        """
        if self._profile is not None or not self._first <= step <= self._last:
            return
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self._on_gpu
        self._profile = profile(activities=activities)
        if self._on_gpu:
            torch.cuda.memory._record_memory_history(max_entries=_MAX_ENTRIES)
        self._profile.start()

    def end_step(self, step: int) -> None:
        """Write the traces behind the last of the steps.

        Args:
            step: that has ended, its optimizer's step included.
        """
        if step >= self._last:
            self.finish()

    def finish(self) -> None:
        """Write what has been traced, if anything, also where a step has failed."""
        traced, self._profile = self._profile, None
        if traced is None:
            return
        traced.stop()
        name = f"rank{self._mesh.rank}"
        try:
            if self._on_gpu:
                snapshot = self._folder / MEMORY_FOLDER / f"{name}.pickle"
                snapshot.parent.mkdir(parents=True, exist_ok=True)
                torch.cuda.memory._dump_snapshot(str(snapshot))
            trace = self._folder / PROFILE_FOLDER / f"{name}.json.gz"
            trace.parent.mkdir(parents=True, exist_ok=True)
            traced.export_chrome_trace(str(trace))
        except OSError as error:
            reason = error.strerror or error
            logger.warning("traces cannot be written to %s (%s)", self._folder, reason)
        finally:
            if self._on_gpu:
                torch.cuda.memory._record_memory_history(enabled=None)
