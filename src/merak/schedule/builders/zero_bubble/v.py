"""Zero bubble V: split backwards on stages laid down the ranks and back up."""

from __future__ import annotations

import numpy as np

from merak.schedule.action_table import tabulate
from merak.schedule.builders.common import check_counts, single_pipe, v_shape
from merak.schedule.ir import Action, Schedule
from merak.schedule.list_scheduler import ForwardRule, Job, Policy, list_schedule
from merak.schedule.simulator.timing import time_actions


def zero_bubble_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Build a V-shaped zero-bubble schedule in the memory of 1F1B: 2P stage activations per rank.

    The order is that of list scheduling with F = I = W, by the best of three rules. No order takes
    less than 6M + P - 1, since rank P - 1 cannot start before P - 1 and then has 6M to do.

    Args:
        num_ranks: pipeline degree P; rank r holds stages r and 2P - 1 - r.
        num_microbatches: microbatches per iteration.

    Raises:
        ScheduleError: a count is below 1.

    Source: arXiv 2401.10241, section 6 (ZB-V).
    """
    check_counts("zero_bubble_v", num_ranks, num_microbatches)
    job = _equal_stages(num_ranks, num_microbatches)
    # Weight gradients wait for idle moments: no more than r of them on rank r, P, or any number.
    rules = (
        (ForwardRule.LATEST_STAGE_BEFORE_BACKWARDS, range(num_ranks)),
        (ForwardRule.FEWEST_FORWARDS, (num_ranks,) * num_ranks),
        (ForwardRule.LATEST_STAGE, (2 * num_microbatches,) * num_ranks),
    )
    in_flight = (num_microbatches,) * 2 * num_ranks
    policies = [Policy(in_flight, tuple(waiting), rule) for rule, waiting in rules]
    candidates = [_schedule(num_ranks, num_microbatches, list_schedule(job, p)) for p in policies]
    return min(candidates, key=_makespan)


def _equal_stages(num_ranks: int, num_microbatches: int) -> Job:
    num_stages = 2 * num_ranks
    one = (1.0,) * num_stages
    return Job(
        num_microbatches=num_microbatches,
        ranks=v_shape(num_ranks),
        forward_s=one,
        recompute_s=(None,) * num_stages,
        inside_s=(0.0,) * num_stages,
        gradient_s=one,
        weight_s=one,
        transfer_s=(0.0,) * (num_stages - 1),
        saved_bytes=one,
        recomputed_bytes=(0.0,) * num_stages,
        left_bytes=one,
        limit_bytes=(float(num_stages),) * num_ranks,
    )


def _schedule(
    num_ranks: int, num_microbatches: int, lists: tuple[tuple[Action, ...], ...] | None
) -> Schedule:
    # 2P activations are room for a microbatch on both stages of a rank, so no rank gets stuck.
    assert lists is not None
    flags = [False] * 2 * num_ranks
    return single_pipe("zero_bubble_v", v_shape(num_ranks), lists, num_microbatches, flags)


def _makespan(schedule: Schedule) -> float:
    table = tabulate(schedule)
    return float(time_actions(schedule, table, np.ones(table.num_actions)).end.max())
