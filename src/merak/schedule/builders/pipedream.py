"""PipeDream: no flush, an update per microbatch, and stashed weights."""

from __future__ import annotations

from merak.schedule.builders.common import check_counts
from merak.schedule.builders.one_f_one_b import one_f_one_b_lists
from merak.schedule.ir import Schedule


def pipedream(num_ranks: int, num_microbatches: int, *, recompute: bool = False) -> Schedule:
    """Build a run of PipeDream: 1F1B that updates a stage after every backward on it.

    Asynchronous. A microbatch's backward uses the weights of its forward, which the rank stashes.
    Staleness: once the pipeline is full, a gradient on stage s is of weights P - 1 - s updates old,
    so stages differ; stage s holds P - s versions. The run starts and ends with an empty pipeline.

    Args:
        num_ranks: pipeline degree, one stage per rank.
        num_microbatches: microbatches of the run, each an update.
        recompute: save only stage inputs; every backward recomputes inside.

    Raises:
        ScheduleError: a count is below 1.

    Source: arXiv 1806.03377 (PipeDream), section 3; arXiv 2107.06925, table 2.
    """
    check_counts("pipedream", num_ranks, num_microbatches)
    delays = [num_ranks - 1 - stage for stage in range(num_ranks)]
    return Schedule(
        name="pipedream",
        pipes=(tuple(range(num_ranks)),),
        microbatch_pipes=(0,) * num_microbatches,
        actions=tuple(one_f_one_b_lists(num_ranks, num_microbatches)),
        recompute=(recompute,) * num_ranks,
        eager_reduction=(True,) * num_ranks,
        microbatches_per_update=1,
        # One backward is done before every forward that follows the warmup's `delay`.
        weight_versions=tuple(
            tuple(max(0, microbatch - delay) for microbatch in range(num_microbatches))
            for delay in delays
        ),
    )
