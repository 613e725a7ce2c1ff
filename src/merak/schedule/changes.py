"""Changes of a schedule: other recompute flags, or fewer microbatches, as in a last step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from merak.core.errors import ScheduleError
from merak.schedule.ir import Kind, Schedule


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
