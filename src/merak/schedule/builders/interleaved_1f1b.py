"""Interleaved 1F1B: several stages per rank, round and round, for a smaller bubble."""

from __future__ import annotations

from merak.core.errors import ScheduleError
from merak.schedule.builders.common import check_counts, single_pipe
from merak.schedule.builders.one_f_one_b import alternate
from merak.schedule.ir import Action, Kind, Schedule


def interleaved_1f1b(
    num_ranks: int, num_microbatches: int, *, chunks: int = 2, recompute: bool = True
) -> Schedule:
    """Build interleaved 1F1B: rank r holds stages r, r + P, r + 2P and so on.

    With equal stages its bubble is P - 1 forwards and backwards of one of the smaller stages.

    Args:
        num_ranks: pipeline degree P.
        num_microbatches: microbatches per iteration, a multiple of P.
        chunks: stages per rank, at least 2.
        recompute: save only stage inputs; every backward recomputes inside.

    Raises:
        ScheduleError: fewer than 2 chunks, or microbatches that are no multiple of P.

    Source: arXiv 2104.04473 (Megatron-LM), section 2.2.2.
    """
    check_interleaved("interleaved_1f1b", num_ranks, num_microbatches, chunks)
    lists = [
        interleaved_actions(rank, num_ranks, num_microbatches, chunks) for rank in range(num_ranks)
    ]
    ranks, flags = [*range(num_ranks)] * chunks, [recompute] * (num_ranks * chunks)
    return single_pipe("interleaved_1f1b", ranks, lists, num_microbatches, flags)


def check_interleaved(name: str, num_ranks: int, num_microbatches: int, chunks: int) -> None:
    """Refuse sizes for which interleaving is not defined.

    Raises:
        ScheduleError: a count is below 1, there are fewer than 2 chunks, or the microbatches are no
            multiple of the ranks.
    """
    check_counts(name, num_ranks, num_microbatches)
    if chunks < 2:
        raise ScheduleError(f"{name} needs at least 2 chunks per rank; got {chunks}. Use 1f1b.")
    if num_microbatches % num_ranks:
        raise ScheduleError(
            f"{name} is defined where the microbatches are a multiple of the {num_ranks} ranks; "
            f"got {num_microbatches}. Use "
            f"{num_microbatches + -num_microbatches % num_ranks} microbatches."
        )


def interleaved_actions(
    rank: int, num_ranks: int, num_microbatches: int, chunks: int
) -> tuple[Action, ...]:
    """A rank's list: P microbatches through every chunk, then the next P.

    The warmup has the forwards of the first P microbatches but those of the last chunk.
    """
    groups = [range(first, first + num_ranks) for first in range(0, num_microbatches, num_ranks)]
    stages = range(rank, num_ranks * chunks, num_ranks)
    forward = [Action(Kind.FORWARD, s, m) for group in groups for s in stages for m in group]
    backward = [
        Action(Kind.BACKWARD, s, m) for group in groups for s in reversed(stages) for m in group
    ]
    num_warmup = 2 * (num_ranks - rank - 1) + (chunks - 1) * num_ranks
    return alternate(forward, backward, num_warmup)
