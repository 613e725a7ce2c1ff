"""Forward only: the schedule of an evaluation, without backwards, reductions and updates."""

from __future__ import annotations

from collections.abc import Sequence

from merak.schedule.builders.common import check_counts, single_pipe
from merak.schedule.ir import Action, Kind, Schedule


def forward_only(stage_ranks: Sequence[int], num_ranks: int, num_microbatches: int) -> Schedule:
    """Build the schedule of an evaluation: every microbatch through all stages, in order.

    Args:
        stage_ranks: the rank of each stage.
        num_ranks: pipeline degree; a rank may hold several stages.
        num_microbatches: microbatches to evaluate.

    Raises:
        ScheduleError: a count is below 1.
    """
    check_counts("forward_only", num_ranks, num_microbatches)
    lists = [
        [
            Action(Kind.FORWARD, stage, microbatch)
            for microbatch in range(num_microbatches)
            for stage, holder in enumerate(stage_ranks)
            if holder == rank
        ]
        for rank in range(num_ranks)
    ]
    recompute = [False] * len(stage_ranks)
    return single_pipe("forward_only", stage_ranks, lists, num_microbatches, recompute)
