"""PipeDream-2BW: no flush, accumulated gradients, and two versions of the weights."""

from __future__ import annotations

from merak.core.errors import ScheduleError
from merak.schedule.builders.common import check_counts
from merak.schedule.builders.one_f_one_b import one_f_one_b_lists
from merak.schedule.ir import Schedule


def pipedream_2bw(
    num_ranks: int,
    num_microbatches: int,
    *,
    microbatches_per_update: int | None = None,
    recompute: bool = False,
) -> Schedule:
    """Build a run of PipeDream-2BW: 1F1B that updates every m microbatches, m ≥ P.

    Asynchronous. Staleness: the same on every stage, one update: microbatches of update t use the
    weights after t - 1 updates (those of the first two, the initial ones). Two versions are held.
    The run starts and ends with an empty pipeline.

    Args:
        num_ranks: pipeline degree, one stage per rank.
        num_microbatches: microbatches of the run.
        microbatches_per_update: m, a divisor of them of at least P; unless given, the smallest.
        recompute: save only stage inputs; every backward recomputes inside.

    Raises:
        ScheduleError: there are less than P microbatches, or m is no such divisor.

    Source: arXiv 2006.09503 (PipeDream-2BW), section 3.1.
    """
    check_counts("pipedream_2bw", num_ranks, num_microbatches)
    per_update = _per_update(num_ranks, num_microbatches, microbatches_per_update)
    versions = tuple(max(0, m // per_update - 1) for m in range(num_microbatches))
    return Schedule(
        name="pipedream_2bw",
        pipes=(tuple(range(num_ranks)),),
        microbatch_pipes=(0,) * num_microbatches,
        actions=tuple(one_f_one_b_lists(num_ranks, num_microbatches)),
        recompute=(recompute,) * num_ranks,
        eager_reduction=(True,) * num_ranks,
        microbatches_per_update=per_update,
        weight_versions=(versions,) * num_ranks,
    )


def _per_update(num_ranks: int, num_microbatches: int, wanted: int | None) -> int:
    possible = [m for m in range(num_ranks, num_microbatches + 1) if num_microbatches % m == 0]
    if not possible:
        raise ScheduleError(
            f"pipedream_2bw accumulates at least {num_ranks} microbatches per update on "
            f"{num_ranks} stages; got {num_microbatches} in all. Use {num_ranks} or more."
        )
    if wanted is None:
        return possible[0]
    if wanted not in possible:
        raise ScheduleError(
            f"pipedream_2bw with {num_ranks} stages and {num_microbatches} microbatches cannot "
            f"update every {wanted}; use one of {', '.join(map(str, possible))}."
        )
    return wanted
