"""Figures of a training loop of the user's own, and the record of its run."""

from __future__ import annotations

import time
from collections.abc import Mapping

from merak.engine.engine import Engine
from merak.engine.health.figures import (
    Figures,
    Interval,
    OwnFigures,
    job_figures,
    memory_bytes,
    own_figures,
)
from merak.engine.recording.recorder import RunRecorder


class LoopFigures:
    """Figures of the steps of a loop, from one call to the next.

    Args:
        engine: of this rank.
        recorder: of the run; None where it is not recorded.
        utilisation: MFU of a job with one microbatch a second; None where no peak is known.
    """

    def __init__(
        self, engine: Engine, recorder: RunRecorder | None, utilisation: float | None
    ) -> None:
        self._engine = engine
        self._recorder = recorder
        self._utilisation = utilisation
        self._since_s: float | None = None
        self._steps = self._microbatches = 0
        self._has_begun = False

    def begin_step(self) -> None:
        """Begin a step; the time before the first one is no training."""
        if self._since_s is None:
            self._since_s = time.perf_counter()

    def end_step(self, microbatches: int) -> None:
        """Count a finished step, and the time since the one before.

        Args:
            microbatches: of all replicas.
        """
        self._steps += 1
        self._microbatches += microbatches

    def take(self, step: int, logged: Mapping[str, float]) -> dict[str, float]:
        """Figures since the last call; all ranks call it together.

        Args:
            step: optimizer steps so far.
            logged: figures of the loop, such as its loss.

        Returns:
            Both, by name.
        """
        now = time.perf_counter()
        seconds = now - (self._since_s or now)
        interval = Interval(seconds, self._steps, self._microbatches, tokens=0)
        self._begin(step - self._steps)
        self._since_s, self._steps, self._microbatches = None, 0, 0
        engine, mesh = self._engine, self._engine.mesh
        name, memory = memory_bytes(mesh.device)
        own = own_figures(memory, engine.progress.records.own() if mesh.pp > 1 else ())
        everyone: list[OwnFigures] = engine.gather(own, "the figures of a log on")
        found: Figures = job_figures(interval, everyone, mesh, name, self._utilisation)
        values = {**logged, **found.values}
        if self._recorder is not None:
            self._recorder.add_steps(engine.recorded_steps)
            self._recorder.add_log(step, values, found)
        return values

    def _begin(self, step: int) -> None:
        if self._recorder is not None and not self._has_begun:
            self._recorder.start(step)
        self._has_begun = True
