"""Recompute flags of a schedule's stages, replaced by others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from merak.core.errors import ScheduleError
from merak.schedule.ir import Kind, Schedule


def recomputing(schedule: Schedule, recompute: Sequence[bool]) -> Schedule:
    """The schedule with other recompute flags.

    The order of forwards and backwards stays. A stage that recomputes nothing has no R; one that
    has none of its own recomputes inside its backwards.

    Args:
        schedule: any schedule.
        recompute: for each stage, whether it recomputes anything.

    Raises:
        ScheduleError: another number of stages.
    """
    if len(recompute) != schedule.num_stages:
        raise ScheduleError(
            f"{schedule.name} has {schedule.num_stages} stages, but {len(recompute)} recompute "
            "flags were given; give one per stage."
        )
    actions = tuple(
        tuple(a for a in own if a.kind is not Kind.RECOMPUTE or recompute[a.stage])
        for own in schedule.actions
    )
    return replace(schedule, actions=actions, recompute=tuple(recompute))
