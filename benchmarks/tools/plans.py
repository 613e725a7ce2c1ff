"""Simpler rules that Merak's planner is compared with, and the time of an iteration of 1F1B."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from merak.plan import Partition
from merak.plan.balance import Timed, min_max_cuts
from merak.plan.critical_path import FloatArray, critical_path
from merak.schedule import Costs, stage_costs


def iteration_time(
    costs: Sequence[Timed], partition: Partition, num_microbatches: int, transfer_s: float = 0.0
) -> float:
    """Seconds of one iteration of 1F1B under a partition."""
    forward_s, backward_s = (_by_stage(costs, partition, f) for f in ("forward_s", "backward_s"))
    return critical_path(forward_s, backward_s, num_microbatches, transfer_s).iteration_s


def _by_stage(costs: Sequence[Timed], partition: Partition, field: str) -> FloatArray:
    return np.array([sum(getattr(costs[i], field) for i in own) for own in partition.stages])


def min_max(costs: Sequence[Timed], num_stages: int) -> Partition:
    """The partition whose largest stage, forward and backward together, is smallest."""
    sums = np.cumsum([0.0, *(cost.forward_s + cost.backward_s for cost in costs)])
    return Partition(len(costs), tuple(min_max_cuts(sums, num_stages).tolist()))


def pipeline_costs(partition: Partition, times: Sequence[Timed], saved: frozenset[int]) -> Costs:
    """Costs of the stages when some segments save their activations, and the others recompute."""
    recompute_s = tuple(
        sum(times[i].forward_s for i in stage if i not in saved) for stage in partition.stages
    )
    return stage_costs(
        tuple(sum(times[i].forward_s for i in stage) for stage in partition.stages),
        tuple(sum(times[i].backward_s for i in stage) for stage in partition.stages),
        recompute_s=recompute_s,
    )


def paper_ratios(first: float, num_stages: int) -> tuple[float, ...]:
    """For each stage, the fraction of segments that save their activations, by Merak's formula.

    Args:
        first: that of the first stage, 0 to 1.
        num_stages: pipeline degree.

    Source: arXiv 2206.04959, section 5.2, the recursive formula for α_i.
    """
    ratios = [min(1.0, (num_stages - 1) * first / (num_stages - i)) for i in range(1, num_stages)]
    if num_stages >= 3:
        ratios[-1] = ratios[-2]
    return (*ratios, 1.0)


def first_of_stages(partition: Partition, ratios: Sequence[float]) -> frozenset[int]:
    """The first segments of each stage, as many as a ratio of the stage's."""
    return frozenset(
        index
        for stage, ratio in zip(partition.stages, ratios, strict=True)
        for index in stage[: math.floor(ratio * len(stage) + 1e-9)]
    )
