"""GEMS: two replicas in opposite directions and one microbatch's activations per rank."""

from __future__ import annotations

from merak.schedule.builders.common import check_counts
from merak.schedule.ir import Action, Kind, Schedule


def gems(num_ranks: int, num_microbatches: int, *, recompute: bool = False) -> Schedule:
    """Build GEMS: even microbatches go down the ranks, odd ones up on a second replica.

    A rank has one microbatch in flight: the next one's forwards follow the backwards of the one
    before. With equal stages and B = 2F it takes M(2P + 1) + P - 1 forwards.

    Args:
        num_ranks: pipeline degree; rank r holds stages r and P - 1 - r.
        num_microbatches: microbatches per iteration.
        recompute: save only stage inputs; every backward recomputes inside.

    Raises:
        ScheduleError: a count is below 1.

    Source: Jain et al., GEMS, SC 2020; arXiv 2107.06925 (Chimera), section 2 and table 2.
    """
    check_counts("gems", num_ranks, num_microbatches)
    down = tuple(range(num_ranks))
    pipes = (down, down[::-1])
    lists = []
    for rank in range(num_ranks):
        stages = [pipes[m % 2].index(rank) for m in range(num_microbatches)]
        lists.append(
            tuple(
                Action(kind, stage, m)
                for m, stage in enumerate(stages)
                for kind in (Kind.FORWARD, Kind.BACKWARD)
            )
        )
    return Schedule(
        name="gems",
        pipes=pipes,
        microbatch_pipes=tuple(m % 2 for m in range(num_microbatches)),
        actions=tuple(lists),
        recompute=(recompute,) * num_ranks,
        eager_reduction=(True,) * num_ranks,
        microbatches_per_update=num_microbatches,
    )
