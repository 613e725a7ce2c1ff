"""Truncation of a schedule to fewer microbatches, as in the last step of an epoch."""

from __future__ import annotations

from dataclasses import replace

from merak.core.errors import ScheduleError
from merak.schedule.ir import Schedule


def truncate(schedule: Schedule, num_microbatches: int) -> Schedule:
    """The schedule without its later microbatches, in the same order.

    The actions that remain depend on none of the others, and every pair of ranks keeps the order of
    its transfers, so the truncation of a valid schedule is valid.

    Args:
        schedule: any schedule.
        num_microbatches: how many remain, from microbatch 0.

    Raises:
        ScheduleError: a count below 1, or above that of the schedule.
    """
    if not 1 <= num_microbatches <= schedule.num_microbatches:
        raise ScheduleError(
            f"{num_microbatches} microbatches cannot be taken of a schedule of "
            f"{schedule.num_microbatches}; use 1 to {schedule.num_microbatches}."
        )
    actions = tuple(
        tuple(action for action in own if action.microbatch < num_microbatches)
        for own in schedule.actions
    )
    return replace(
        schedule,
        microbatch_pipes=schedule.microbatch_pipes[:num_microbatches],
        actions=actions,
        microbatches_per_update=min(schedule.microbatches_per_update, num_microbatches),
        weight_versions=tuple(own[:num_microbatches] for own in schedule.weight_versions),
    )
