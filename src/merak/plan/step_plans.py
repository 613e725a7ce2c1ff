"""Step plans of a job: its schedule, lowered to every rank's steps, for any microbatch count."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from merak.schedule.changes import recomputing, truncate
from merak.schedule.ir import Kind, Schedule
from merak.schedule.lead import max_lead
from merak.schedule.lower import lower
from merak.schedule.registry import is_file, options, resolve
from merak.schedule.steps import Step

_CHOSEN = {"recompute": False, "early_everywhere": True, "max_copies": 1}
"""Options of a job's schedules, where they exist: save activations, one copy of the weights."""

_SLACK = 2
"""Open sends beyond those that a schedule needs."""


@dataclass(slots=True)
class StepPlan:
    """Schedule for a number of microbatches, with every rank's steps."""

    schedule: Schedule
    steps: tuple[tuple[Step, ...], ...]
    _ahead: dict[tuple[int, int, int], int] = field(default_factory=dict, compare=False)

    def open_sends(self, pipe: int, stage: int, behind: int) -> int:
        """Limit on the open sends of a pipe's backwards to another stage.

        With as many as the lead of one stage over the other nothing can deadlock; a few more keep
        the rank from waiting for slow transfers.
        """
        key = (pipe, stage, behind)
        if key not in self._ahead:
            self._ahead[key] = max_lead(self.schedule, stage, behind, pipe) + _SLACK
        return self._ahead[key]

    def order(self, stage: int, pipe: int, kinds: Collection[Kind]) -> tuple[int, ...]:
        """Microbatches of a pipe in the order of a stage's actions of some kinds."""
        schedule = self.schedule
        return tuple(
            action.microbatch
            for action in schedule.actions[schedule.pipes[pipe][stage]]
            if action.stage == stage
            and action.kind in kinds
            and schedule.microbatch_pipes[action.microbatch] == pipe
        )


class StepPlans:
    """Step plans of a job by number of microbatches: the last step of an epoch may have fewer.

    Args:
        name: of a schedule, or the path of a schedule file.
        num_ranks: pipeline degree.
        num_microbatches: of an ordinary step.
        recompute: for each stage, whether it recomputes anything; None leaves it to the schedule.
        chosen: further options of a named schedule's builder.

    Raises:
        ScheduleError: an unknown name, or a schedule that is not defined for these counts.
    """

    def __init__(
        self,
        name: str,
        num_ranks: int,
        num_microbatches: int,
        recompute: Sequence[bool] | None = None,
        chosen: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        known = () if is_file(name) else options(name)
        self.takes_costs = "costs" in known
        if self.takes_costs:  # a synthesised schedule decides by itself what to recompute
            known = tuple(option for option in known if option != "recompute")
        chosen = {o: value for o, value in _CHOSEN.items() if o in known} | dict(chosen)
        self._recompute = recompute
        self._whole = self._as_chosen(resolve(name, num_ranks, num_microbatches, **chosen))
        self._chosen = chosen
        self._name = name
        self._plans = {num_microbatches: StepPlan(self._whole, lower(self._whole))}
        self._with_flags: dict[tuple[bool, ...], StepPlans] = {}

    def recomputing(self, recompute: Sequence[bool]) -> StepPlans:
        """Step plans of the same schedule with other recompute flags of its stages."""
        whole, flags = self._whole, tuple(recompute)
        if flags not in self._with_flags:
            counts = (whole.num_ranks, whole.num_microbatches)
            self._with_flags[flags] = StepPlans(self._name, *counts, flags, self._chosen)
        return self._with_flags[flags]

    def of_as_many(self, num_microbatches: int) -> Schedule:
        """The schedule of a job with another number of microbatches.

        Raises:
            ScheduleError: it is not defined for so many, or comes from a file.
        """
        return resolve(self._name, self._whole.num_ranks, num_microbatches, **self._chosen)

    @property
    def base(self) -> StepPlan:
        """The plan of an ordinary step."""
        return self._plans[self._whole.num_microbatches]

    def __call__(self, num_microbatches: int) -> StepPlan:
        """The plan for a number of microbatches; with fewer than usual, the usual one truncated."""
        if num_microbatches not in self._plans:
            schedule = self._of(num_microbatches)
            self._plans[num_microbatches] = StepPlan(schedule, lower(schedule))
        return self._plans[num_microbatches]

    def _of(self, num_microbatches: int) -> Schedule:
        if num_microbatches < self._whole.num_microbatches:
            return truncate(self._whole, num_microbatches)
        num_ranks = self._whole.num_ranks
        return self._as_chosen(resolve(self._name, num_ranks, num_microbatches, **self._chosen))

    def _as_chosen(self, schedule: Schedule) -> Schedule:
        return schedule if self._recompute is None else recomputing(schedule, self._recompute)
