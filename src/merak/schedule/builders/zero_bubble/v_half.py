"""V-Half: half of 1F1B's activations and half of its bubble, on stages down the ranks and up."""

from __future__ import annotations

from merak.schedule.builders.zero_bubble.v_pattern import v_pattern
from merak.schedule.ir import Schedule


def v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """Build V-Half: a rank holds (P + 2) // 2 microbatches, where 1F1B's first holds P.

    With equal stages, F = I = W, P ≥ 3 and M ≥ P it takes 6M + 3P - 4 times a stage's forward.

    Args:
        num_ranks: pipeline degree P; rank r holds stages r and 2P - 1 - r.
        num_microbatches: microbatches per iteration.

    Raises:
        ScheduleError: a count is below 1.

    Source: arXiv 2405.15362 (V-Half).
    """
    steps, most_in_flight = (1, 2, 1, 2), 2 * ((num_ranks + 2) // 2)
    return v_pattern("v_half", num_ranks, num_microbatches, steps, most_in_flight)
