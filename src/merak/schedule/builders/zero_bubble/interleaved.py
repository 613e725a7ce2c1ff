"""Interleaved 1F1B with split backwards."""

from __future__ import annotations

from merak.schedule.builders.common import single_pipe, split_backwards
from merak.schedule.builders.interleaved_1f1b import check_interleaved, interleaved_actions
from merak.schedule.ir import Schedule


def interleaved_zero_bubble(num_ranks: int, num_microbatches: int, *, chunks: int = 2) -> Schedule:
    """Build interleaved 1F1B with split backwards, where rank r runs its W r backwards late.

    With equal stages and F = I = W = 1 it takes 3M · chunks + P - 1.

    Args:
        num_ranks: pipeline degree P; rank r holds stages r, r + P, r + 2P and so on.
        num_microbatches: microbatches per iteration, a multiple of P.
        chunks: stages per rank, at least 2.

    Raises:
        ScheduleError: fewer than 2 chunks, or microbatches that are no multiple of P.

    Source: arXiv 2401.10241, section 2; arXiv 2104.04473, section 2.2.2.
    """
    check_interleaved("interleaved_zero_bubble", num_ranks, num_microbatches, chunks)
    lists = [
        split_backwards(interleaved_actions(rank, num_ranks, num_microbatches, chunks), rank)
        for rank in range(num_ranks)
    ]
    ranks, flags = [*range(num_ranks)] * chunks, [False] * (num_ranks * chunks)
    return single_pipe("interleaved_zero_bubble", ranks, lists, num_microbatches, flags)
