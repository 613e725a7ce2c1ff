"""Zero bubble H2: enough forwards ahead that no rank idles once it has begun."""

from __future__ import annotations

from merak.schedule.builders.common import check_counts, straight
from merak.schedule.builders.one_f_one_b import one_f_one_b_actions
from merak.schedule.builders.zero_bubble.idle import with_weights_in_idle_moments
from merak.schedule.ir import Action, Kind, Schedule


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """Build ZB-H2: split backwards behind 2(P - s) - 1 forwards of stage s, in twice the memory.

    With equal stages, F = I = W = 1 and M ≥ 2P - 1, each rank works 3M without a pause, rank s from
    moment s on. The optimizer steps after the last, so that the iteration takes 3M + P - 1: the
    paper's step before the gradient norm is known, undone if that was wrong, is left out.

    Args:
        num_ranks: pipeline degree P, one stage per rank.
        num_microbatches: microbatches per iteration M.

    Raises:
        ScheduleError: a count is below 1.

    Source: arXiv 2401.10241 (ZB-H2).
    """
    check_counts("zb_h2", num_ranks, num_microbatches)
    orders = [_order(stage, num_ranks, num_microbatches) for stage in range(num_ranks)]
    lists = with_weights_in_idle_moments(orders, num_ranks, 2 * num_ranks - 1)
    return straight("zb_h2", lists, num_microbatches, [False] * num_ranks)


def _order(stage: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    num_in_flight = 2 * (num_ranks - stage) - 1
    return [
        Action(Kind.INPUT_GRADIENT, stage, action.microbatch)
        if action.kind is Kind.BACKWARD
        else action
        for action in one_f_one_b_actions(stage, num_in_flight, num_microbatches)
    ]
