"""Breadth-first (looped): all microbatches through a rank's stage before those of its next one."""

from __future__ import annotations

from merak.core.errors import ScheduleError
from merak.schedule.builders.common import backwards, check_counts, forwards, single_pipe
from merak.schedule.ir import Action, Schedule


def looped_bfs(
    num_ranks: int, num_microbatches: int, *, chunks: int = 2, recompute: bool = True
) -> Schedule:
    """Build the breadth-first pipeline: GPipe's order on several stages per rank, round and round.

    A stage's microbatches follow one another, so that its weights are gathered, and its gradients
    reduced, once. With equal stages and M ≥ P, its bubble is that of `interleaved_1f1b`.

    Args:
        num_ranks: pipeline degree P; rank r holds stages r, r + P, r + 2P and so on.
        num_microbatches: microbatches per iteration.
        chunks: stages per rank, at least 2.
        recompute: save only stage inputs between forward and backward.

    Raises:
        ScheduleError: a count is below 1, or there are fewer than 2 chunks.

    Source: arXiv 2211.05953.
    """
    check_counts("looped_bfs", num_ranks, num_microbatches)
    if chunks < 2:
        raise ScheduleError(
            f"looped_bfs needs at least 2 chunks per rank; got {chunks}. Use gpipe."
        )
    lists = [_rank_actions(rank, num_ranks, num_microbatches, chunks) for rank in range(num_ranks)]
    ranks, flags = [*range(num_ranks)] * chunks, [recompute] * (num_ranks * chunks)
    return single_pipe("looped_bfs", ranks, lists, num_microbatches, flags)


def _rank_actions(
    rank: int, num_ranks: int, num_microbatches: int, chunks: int
) -> tuple[Action, ...]:
    stages, every = range(rank, num_ranks * chunks, num_ranks), range(num_microbatches)
    warmup = [action for stage in stages for action in forwards(stage, every)]
    cooldown = [action for stage in reversed(stages) for action in backwards(stage, every)]
    return (*warmup, *cooldown)
