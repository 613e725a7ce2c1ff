"""V-Min: a third of 1F1B's activations and two thirds of its bubble, on stages in a V."""

from __future__ import annotations

from merak.schedule.builders.zero_bubble.v_pattern import v_pattern
from merak.schedule.ir import Schedule


def v_min(num_ranks: int, num_microbatches: int) -> Schedule:
    """Build V-Min: a rank holds (P + 4) // 3 microbatches, where 1F1B's first holds P.

    With equal stages, F = I = W and P, M ≥ 2 it takes 6M + 4P - 5 times a stage's forward, and two
    more where P is a multiple of 3.

    Args:
        num_ranks: pipeline degree P; rank r holds stages r and 2P - 1 - r.
        num_microbatches: microbatches per iteration.

    Raises:
        ScheduleError: a count is below 1.

    Source: arXiv 2405.15362 (V-Min).
    """
    steps, most_in_flight = (1, 1, 1, 1), 2 * ((num_ranks + 4) // 3)
    return v_pattern("v_min", num_ranks, num_microbatches, steps, most_in_flight)
