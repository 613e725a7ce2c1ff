"""1F1B with early recomputation everywhere but on the last stage, which saves its activations."""

from __future__ import annotations

from merak.schedule.builders.common import check_counts, recompute_early, straight
from merak.schedule.builders.one_f_one_b import one_f_one_b_lists
from merak.schedule.ir import Schedule


def last_no_recompute(num_ranks: int, num_microbatches: int) -> Schedule:
    """Build 1F1B with early recomputation and none on the last stage.

    The last stage has one microbatch in flight, and so holds its activations whole in any case.
    With equal stages and F = R = 1, B = 2 it takes 4M + 3(P - 2) + 1.

    Args:
        num_ranks: pipeline degree, one stage per rank.
        num_microbatches: microbatches per iteration.

    Raises:
        ScheduleError: a count is below 1.

    Source: arXiv 2206.04959 (Merak), section 5.1.
    """
    check_counts("last_no_recompute", num_ranks, num_microbatches)
    *others, last = one_f_one_b_lists(num_ranks, num_microbatches)
    lists = [*(recompute_early(own, range(num_microbatches)) for own in others), last]
    recompute = [True] * len(others) + [False]
    return straight("last_no_recompute", lists, num_microbatches, recompute)
