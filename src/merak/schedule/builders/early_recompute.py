"""1F1B that recomputes while it waits for gradients."""

from __future__ import annotations

from merak.schedule.builders.common import check_counts, recompute_early, straight
from merak.schedule.builders.one_f_one_b import one_f_one_b_lists
from merak.schedule.ir import Schedule


def early_recompute(num_ranks: int, num_microbatches: int) -> Schedule:
    """Build 1F1B with every recomputation ahead of its gradient.

    With equal stages and F = R = 1, B = 2 it takes 4M + 3(P - 1).

    Args:
        num_ranks: pipeline degree, one stage per rank.
        num_microbatches: microbatches per iteration.

    Raises:
        ScheduleError: a count is below 1.

    Source: arXiv 2206.04959 (Merak), section 5.1; arXiv 1811.06965 (GPipe), section 2.3.
    """
    check_counts("early_recompute", num_ranks, num_microbatches)
    every = range(num_microbatches)
    lists = [recompute_early(own, every) for own in one_f_one_b_lists(num_ranks, num_microbatches)]
    return straight("early_recompute", lists, num_microbatches, [True] * num_ranks)
