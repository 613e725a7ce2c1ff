"""Orders of a V-shaped pipeline that repeat one microbatch's pattern; its steps say the memory."""

from __future__ import annotations

from itertools import product

from merak.schedule.builders.common import check_counts, single_pipe, v_shape
from merak.schedule.builders.zero_bubble.idle import with_weights_in_idle_moments
from merak.schedule.ir import Action, Kind, Schedule

_PERIOD = 6
"""Moments of a rank's work on a microbatch: F, I and W of two stages."""


def v_pattern(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    steps: tuple[int, int, int, int],
    most_in_flight: int,
) -> Schedule:
    """Build a schedule in which each microbatch does what the last one did, six moments later.

    The time between a stage's F and I, over six moments, is how many microbatches it holds.

    Args:
        name: of the schedule.
        num_ranks: pipeline degree P; rank r holds stages r and 2P - 1 - r.
        num_microbatches: microbatches per iteration.
        steps: moments from a stage to the next: F down the ranks, F up, I down and I up.
        most_in_flight: activations of a stage that a rank holds.

    Raises:
        ScheduleError: a count is below 1.

    Source: arXiv 2405.15362.
    """
    check_counts(name, num_ranks, num_microbatches)
    orders = _orders(_pattern(num_ranks, steps), num_microbatches)
    lists = with_weights_in_idle_moments(orders, 2 * num_ranks, most_in_flight)
    flags = [False] * 2 * num_ranks
    return single_pipe(name, v_shape(num_ranks), lists, num_microbatches, flags)


def _pattern(num_ranks: int, steps: tuple[int, int, int, int]) -> list[list[tuple[int, Action]]]:
    """Each rank's F and I of microbatch 0 with their moments, of different places in the period.

    At its turns, at the last rank and at the first one, it waits as short as this allows.
    """
    for waits in sorted(product(range(_PERIOD), repeat=3), key=sum):
        pattern = _laid_out(num_ranks, steps, (0, *waits))
        if all(len({moment % _PERIOD for moment, _ in own}) == len(own) for own in pattern):
            return pattern
    raise AssertionError(f"steps {steps} have no pattern on {num_ranks} ranks")


def _laid_out(
    num_ranks: int, steps: tuple[int, ...], waits: tuple[int, ...]
) -> list[list[tuple[int, Action]]]:
    """Each rank's F and I of microbatch 0 with their moments."""
    pattern: list[list[tuple[int, Action]]] = [[] for _ in range(num_ranks)]
    ranks, count = v_shape(num_ranks), 2 * num_ranks
    down, up = range(num_ranks), range(num_ranks, count)
    legs = (
        (Kind.FORWARD, down),
        (Kind.FORWARD, up),
        (Kind.INPUT_GRADIENT, reversed(up)),
        (Kind.INPUT_GRADIENT, reversed(down)),
    )
    moment = 0
    for (kind, stages), step, wait in zip(legs, steps, waits, strict=True):
        moment += wait
        for stage in stages:
            pattern[ranks[stage]].append((moment, Action(kind, stage, 0)))
            moment += step
        moment += 1 - step
    return pattern


def _orders(pattern: list[list[tuple[int, Action]]], num_microbatches: int) -> list[list[Action]]:
    """Each rank's F and I of all microbatches, by their moments, which are all different."""
    orders = []
    for own in pattern:
        moments = {
            moment + _PERIOD * m: Action(action.kind, action.stage, m)
            for moment, action in own
            for m in range(num_microbatches)
        }
        orders.append([moments[moment] for moment in sorted(moments)])
    return orders
