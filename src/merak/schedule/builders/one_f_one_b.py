"""1F1B (DAPPLE): as few microbatches in flight as keep the pipeline busy."""

from __future__ import annotations

from collections.abc import Sequence

from merak.schedule.builders.common import backwards, check_counts, forwards, straight
from merak.schedule.ir import Action, Schedule


def one_f_one_b(num_ranks: int, num_microbatches: int, *, recompute: bool = True) -> Schedule:
    """Build the 1F1B schedule with a flush after every iteration.

    Args:
        num_ranks: pipeline degree, one stage per rank.
        num_microbatches: microbatches per iteration.
        recompute: save only stage inputs; every backward recomputes inside.

    Raises:
        ScheduleError: a count is below 1.

    Source: arXiv 2007.01045 (DAPPLE), section 3; arXiv 2107.06925, figure 2.
    """
    check_counts("1f1b", num_ranks, num_microbatches)
    lists = one_f_one_b_lists(num_ranks, num_microbatches)
    return straight("1f1b", lists, num_microbatches, [recompute] * num_ranks)


def one_f_one_b_lists(num_ranks: int, num_microbatches: int) -> list[tuple[Action, ...]]:
    """Every rank's 1F1B list: as many microbatches in flight as there are stages from it on."""
    return [
        one_f_one_b_actions(stage, num_ranks - stage, num_microbatches)
        for stage in range(num_ranks)
    ]


def one_f_one_b_actions(
    stage: int, num_in_flight: int, num_microbatches: int
) -> tuple[Action, ...]:
    """A rank's 1F1B list, with at most `num_in_flight` microbatches in flight."""
    forward = forwards(stage, range(num_microbatches))
    backward = backwards(stage, range(num_microbatches))
    return alternate(forward, backward, min(num_in_flight - 1, num_microbatches))


def alternate(
    forward: Sequence[Action], backward: Sequence[Action], num_warmup: int
) -> tuple[Action, ...]:
    """Some forwards, then a forward and a backward in turn, then the backwards that are left."""
    warmup, rest = forward[:num_warmup], forward[num_warmup:]
    steady = [action for pair in zip(rest, backward, strict=False) for action in pair]
    cooldown = backward[len(rest) :]
    return (*warmup, *steady, *cooldown)
