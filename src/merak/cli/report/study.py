"""Study of a run's record: a typical step, its idle times, and the same step simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from merak.record.idle import Cause, Idle, critical_path, idle_by_cause, idle_times
from merak.record.replay import expected_costs, measured_costs, replay, typical_step
from merak.record.run import LogRecord, MeasuredStep, RunRecord
from merak.schedule.costs import Costs
from merak.schedule.ir import Action
from merak.schedule.simulator.simulate import Simulation, simulate


@dataclass(frozen=True, slots=True)
class StepStudy:
    """Study of a typical step.

    Args:
        step: of median length among those that were measured.
        costs: of its stages, as measured.
        simulated: the same schedule with these costs: what the order of actions alone allows.
        idle: times of all ranks, with causes.
        critical: actions that lead without slack to the last one.
        outside_s: seconds from the end of one step to the beginning of the next, the median; None
            where no two consecutive steps were measured.
        expected_s: seconds from the first forward to the last backward, as expected before the run.
    """

    step: MeasuredStep
    costs: Costs
    simulated: Simulation
    idle: tuple[Idle, ...]
    critical: tuple[Action, ...]
    outside_s: float | None
    expected_s: float | None

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.step.records)

    def busy(self, rank: int) -> float:
        """Fraction of the pipeline's time in which a rank computes."""
        return 1.0 - sum(self.shares(rank).values())

    def shares(self, rank: int) -> dict[Cause, float]:
        """Fractions of the pipeline's time in which a rank is idle, by cause."""
        whole_s = self.step.pipeline_s or 1.0
        return {cause: s / whole_s for cause, s in idle_by_cause(self.idle, rank).items()}

    @property
    def bubble(self) -> float:
        """Fraction of the pipeline's time in which ranks are idle, over all of them."""
        return 1.0 - fmean(self.busy(rank) for rank in range(self.num_ranks))

    @property
    def reduction_s(self) -> float:
        """Seconds from the last action to the end of the last reduction."""
        return self.step.end_s - self.step.begin_s - self.step.pipeline_s

    @property
    def period_s(self) -> float:
        """Seconds from the beginning of a step to that of the next, as far as it is known."""
        return self.step.end_s - self.step.begin_s + (self.outside_s or 0.0)


def study_step(run: RunRecord) -> StepStudy | None:
    """Study a typical step of a run; None where none was measured.

    Args:
        run: its record.
    """
    steps = tuple(step for step in run.steps if step.pipeline_s > 0 and all(step.records))
    if not steps:
        return None
    step = typical_step(steps)
    expected = expected_costs(run.job)
    return StepStudy(
        step=step,
        costs=measured_costs(step),
        simulated=replay(step, transfers=False),
        idle=idle_times(step),
        critical=critical_path(step),
        outside_s=_outside_s(steps),
        expected_s=None if expected is None else simulate(run.job.schedule, expected).makespan,
    )


def _outside_s(steps: Sequence[MeasuredStep]) -> float | None:
    """Seconds between two consecutive steps, the median."""
    pairs = pairwise(steps)
    found = [after.begin_s - own.end_s for own, after in pairs if after.step == own.step + 1]
    return max(0.0, median(found)) if found else None


def typical(logs: Sequence[LogRecord], name: str) -> float | None:
    """The median of a figure over a run's logs; the first log, which has the start in it, is left.

    Args:
        logs: of the run.
        name: of the figure.
    """
    found = [log.figures[name] for log in logs if name in log.figures]
    return median(found[1:] or found) if found else None
