"""When gradients are reduced: the communication that runs beside the actions."""

from __future__ import annotations

from dataclasses import dataclass

from merak.schedule.action_table import ActionTable, FloatArray
from merak.schedule.ir import FINAL_KINDS, Schedule


@dataclass(frozen=True, slots=True)
class Reduction:
    """One stage's gradients, reduced over all ranks that hold the stage."""

    stage: int
    ranks: tuple[int, ...]
    start: float
    end: float
    # Index of the action whose end the start waited for.
    after: int


def reduction_points(schedule: Schedule, rank: int) -> list[tuple[int, int, int]]:
    """Where a rank starts its reductions: (position to start after, stage, update), in order.

    Later stages come first on every rank, since their gradients are complete first: ranks that
    share several stages thus start their reductions in one order. A rank without actions gives its
    zeros at position -1.
    """
    if not schedule.has_backwards:
        return []
    actions = schedule.actions[rank]
    final = {
        (action.stage, schedule.update_of(action.microbatch)): position
        for position, action in enumerate(actions)
        if action.kind in FINAL_KINDS
    }
    stages = tuple(reversed(schedule.stages_of(rank)))
    eager = [stage for stage in stages if schedule.eager_reduction[stage]]
    late = [stage for stage in stages if not schedule.eager_reduction[stage]]
    last = len(actions) - 1
    points = []
    after = min(0, last)
    for update in range(schedule.num_updates):
        for stage in eager:
            after = max(after, final.get((stage, update), after))
            points.append((after, stage, update))
        points.extend((last, stage, update) for stage in late)
    return points


def time_reductions(
    schedule: Schedule, table: ActionTable, end: FloatArray, seconds: tuple[float, ...]
) -> tuple[Reduction, ...]:
    """When the reductions of a synchronous schedule run; none where they take no time.

    A reduction starts when all its ranks have reached it; a rank runs one at a time, beside its
    actions. Asynchronous schedules wait for theirs inside the action that completes an update.
    """
    if not schedule.is_synchronous or not any(seconds):
        return ()
    free = [0.0] * schedule.num_ranks
    reached = [
        {stage: after for after, stage, _ in reduction_points(schedule, rank)}
        for rank in range(schedule.num_ranks)
    ]
    result = []
    eager_first = sorted(
        range(schedule.num_stages), key=lambda s: (not schedule.eager_reduction[s], -s)
    )
    for stage in eager_first:
        ranks = schedule.ranks_of(stage)
        indices = [table.starts[r] + reached[r][stage] for r in ranks if reached[r][stage] >= 0]
        if not indices:
            continue
        after = max(indices, key=lambda i: float(end[i]))
        start = max(float(end[after]), *(free[r] for r in ranks))
        done = start + seconds[stage]
        for rank in ranks:
            free[rank] = done
        result.append(Reduction(stage, ranks, start, done, after))
    return tuple(result)
