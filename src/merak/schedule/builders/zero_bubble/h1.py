"""Zero bubble H1: 1F1B whose weight gradients fill the cooldown, in the memory of 1F1B."""

from __future__ import annotations

from merak.schedule.builders.common import check_counts, split_backwards, straight
from merak.schedule.builders.one_f_one_b import one_f_one_b_lists
from merak.schedule.ir import Schedule


def zero_bubble_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """Build ZB-H1: backwards split in two, and stage s runs its W s microbatches late.

    Stage s thus holds its activations as long as stage 0 does, P microbatches on every rank. With
    equal stages, F = I = W = 1 and M ≥ P it takes 3M + P - 1.

    Args:
        num_ranks: pipeline degree, one stage per rank.
        num_microbatches: microbatches per iteration.

    Raises:
        ScheduleError: a count is below 1.

    Source: arXiv 2401.10241, section 2.1 and figure 2.
    """
    check_counts("zero_bubble_h1", num_ranks, num_microbatches)
    plain = one_f_one_b_lists(num_ranks, num_microbatches)
    lists = [split_backwards(own, stage) for stage, own in enumerate(plain)]
    return straight("zero_bubble_h1", lists, num_microbatches, [False] * num_ranks)
