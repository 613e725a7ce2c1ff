"""Recording of a run by rank 0: the layout, every log, and measured steps now and then."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from merak.core.mesh import Mesh
from merak.engine.health.figures import Figures
from merak.engine.health.step_records import StepRecord
from merak.record.files import RecordWriter
from merak.record.run import JobRecord, LogRecord, MeasuredStep

logger = logging.getLogger(__name__)

KEPT_STEPS = 8
"""Measured steps that the record has, the last ones."""


def is_due(number: int) -> bool:
    """Whether steps are gathered at a log: at the second, the fourth, the eighth and so on.

    They are gathered by the ranks of a pipeline together, so all of them must come to one answer.

    Args:
        number: of the log, from 1; before the first, steps are slower than they will be.
    """
    return number >= 2 and number & (number - 1) == 0


class RunRecorder:
    """Writer of a run's record on rank 0, which never ends a job by what it cannot write.

    Args:
        mesh: the grid of ranks.
        folder: of the run.
        job: as it was laid out; None on ranks that do not write.
    """

    def __init__(self, mesh: Mesh, folder: str, job: JobRecord | None) -> None:
        self._mesh = mesh
        self._folder = folder
        self._job = job
        self._writer: RecordWriter | None = None
        self._steps: list[MeasuredStep] = []
        self._num_logs = 0

    def start(self, step: int) -> None:
        """Begin to record a job's steps on this rank.

        Args:
            step: optimizer steps so far; above 0 the logs of the run before are left.
        """
        self._num_logs = 0
        with self._trying():
            if self._job is not None:
                self._writer = RecordWriter(self._folder, self._job, goes_on=step > 0)

    def add_log(self, step: int, logs: Mapping[str, Any], figures: Figures) -> None:
        """Record a log of training.

        Args:
            step: optimizer steps so far.
            logs: by name; what is no number is left out.
            figures: of the job, which are among them as far as they are numbers.
        """
        numbers = {k: float(v) for k, v in logs.items() if isinstance(v, int | float)}
        if self._writer is not None:
            log = LogRecord(step, time.time(), numbers, figures.memory_bytes, figures.busy)
            with self._trying():
                self._writer.add_log(log)

    def add_steps(self, gather: Callable[[], Sequence[StepRecord]], *, last: bool = False) -> None:
        """Record the measured steps of a pipeline, if they are due; its ranks call it together.

        Args:
            gather: gathers the last steps of all ranks of the pipeline.
            last: whether training has ended.
        """
        self._num_logs += not last
        if not (last or is_due(self._num_logs)):
            return
        found = [
            MeasuredStep(own.step, own.schedule, own.records, own.spans)
            for own in gather()
            if any(own.records)
        ]
        known = {step.step: step for step in (*self._steps, *found)}
        self._steps = [known[number] for number in sorted(known)][-KEPT_STEPS:]
        if self._writer is not None and self._steps:
            with self._trying():
                self._writer.write_steps(self._steps)

    @contextmanager
    def _trying(self) -> Iterator[None]:
        """Stop recording where it fails: training is worth more than its record."""
        try:
            yield
        except OSError as error:
            self._writer = None
            logger.warning(
                "the record of this run cannot be written to %s (%s), so `merak report` will have "
                "no more of it; training goes on",
                self._folder,
                error.strerror or error,
            )
