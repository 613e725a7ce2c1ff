"""GPipe: every forward, then every backward."""

from __future__ import annotations

from merak.schedule.builders.common import backwards, check_counts, forwards, straight
from merak.schedule.ir import Action, Schedule


def gpipe(num_ranks: int, num_microbatches: int, *, recompute: bool = True) -> Schedule:
    """Build GPipe's schedule: all forwards, then all backwards in the same order.

    Args:
        num_ranks: pipeline degree, one stage per rank.
        num_microbatches: microbatches per iteration.
        recompute: save only stage inputs between forward and backward.

    Raises:
        ScheduleError: a count is below 1.

    Source: arXiv 1811.06965, section 2.3.
    """
    check_counts("gpipe", num_ranks, num_microbatches)
    lists = [_rank_actions(stage, num_microbatches) for stage in range(num_ranks)]
    return straight("gpipe", lists, num_microbatches, [recompute] * num_ranks)


def _rank_actions(stage: int, num_microbatches: int) -> tuple[Action, ...]:
    warmup = forwards(stage, range(num_microbatches))
    cooldown = backwards(stage, range(num_microbatches))
    return (*warmup, *cooldown)
