"""Times of partitions and stages, written out apart from the planner that they judge."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from merak.plan.balance import Timed, min_max_cuts
from merak.plan.critical_path import critical_path
from merak.plan.partition import Partition
from merak.schedule.costs import Costs, stage_costs


def iteration_time(
    costs: Sequence[Timed],
    partition: Partition,
    num_microbatches: int,
    transfer_s: float = 0.0,
) -> float:
    """Seconds of one iteration of 1F1B under a partition."""
    forward_s = np.array([sum(costs[i].forward_s for i in own) for own in partition.stages])
    backward_s = np.array([sum(costs[i].backward_s for i in own) for own in partition.stages])
    return critical_path(forward_s, backward_s, num_microbatches, transfer_s).iteration_s


def min_max(costs: Sequence[Timed], num_stages: int) -> Partition:
    """The partition whose largest stage is smallest, by the starting point of the planner."""
    seconds = [c.forward_s + c.backward_s for c in costs]
    cuts = min_max_cuts(np.cumsum([0.0, *seconds]), num_stages)
    return Partition(len(costs), tuple(cuts.tolist()))


def pipeline_costs(partition: Partition, times: Sequence[Timed], saved: frozenset[int]) -> Costs:
    """Costs of the stages when some segments save their activations, and the others recompute."""
    return stage_costs(
        tuple(sum(times[i].forward_s for i in stage) for stage in partition.stages),
        tuple(sum(times[i].backward_s for i in stage) for stage in partition.stages),
        recompute_s=tuple(
            sum(times[i].forward_s for i in stage if i not in saved) for stage in partition.stages
        ),
    )
