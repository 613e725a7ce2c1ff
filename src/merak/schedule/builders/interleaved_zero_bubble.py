"""Interleaved 1F1B with split backwards."""

from __future__ import annotations

from merak.schedule.builders.common import single_pipe, split_backwards
from merak.schedule.builders.interleaved_1f1b import (
    check_interleaved,
    interleaved_orders,
    interleaved_warmup,
)
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
    lists = []
    for rank in range(num_ranks):
        forward, backward = interleaved_orders(rank, num_ranks, num_microbatches, chunks)
        num_warmup = interleaved_warmup(rank, num_ranks, num_microbatches, chunks)
        warmup, rest = forward[:num_warmup], forward[num_warmup:]
        steady = [action for pair in zip(rest, backward) for action in pair]
        cooldown = backward[len(rest) :]
        lists.append(split_backwards((*warmup, *steady, *cooldown), rank))
    num_stages = num_ranks * chunks
    ranks = [stage % num_ranks for stage in range(num_stages)]
    flags = [False] * num_stages
    return single_pipe("interleaved_zero_bubble", ranks, lists, num_microbatches, flags)
