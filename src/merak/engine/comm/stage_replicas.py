"""The replicas of a stage: the groups that reduce its gradients, and in which buckets."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import torch.distributed as dist
from torch import nn

from merak.core.mesh import REPLICAS, Mesh, group_of_lines
from merak.engine.comm.gradient_buckets import StageGradients, fill_buckets
from merak.graph.ir.ir import Segment
from merak.graph.trace.branches.flags import optional_parameters
from merak.plan.cluster.hierarchy import lines_of
from merak.schedule.ir import Schedule


def gradients_to_reduce(
    segments: Mapping[int, Sequence[Segment]],
    owners: Mapping[str, frozenset[int]],
    groups: Mapping[int, dist.ProcessGroup | None],
    parameters: Mapping[str, nn.Parameter],
    shared: frozenset[str],
    bucket_bytes: int,
    left_out: Container[str] = (),
) -> dict[int, StageGradients]:
    """The gradients to reduce, of each of this rank's stages.

    Args:
        segments: of each of this rank's stages.
        owners: the stages that hold each parameter, by its name.
        groups: the replicas of each stage, as `replica_groups` makes them.
        parameters: this rank's parameters by name.
        shared: parameters that several segments read; the stage of the first one reduces them.
        bucket_bytes: a reduction starts as soon as it has so many bytes.
        left_out: parameters that other groups of ranks reduce.
    """
    reduced = {}
    for stage, own_segments in segments.items():
        every = [name for segment in reversed(own_segments) for name in segment.parameters]
        owned = [n for n in dict.fromkeys(every) if n in shared and min(owners[n]) == stage]
        names = [name for name in every if name not in shared] + owned
        own = [
            parameters[name]
            for name in names
            if name not in left_out and not parameters[name].is_meta
        ]
        optional = frozenset(
            id(parameters[name])
            for segment in own_segments
            for name in optional_parameters(segment)
        )
        buckets = fill_buckets(own, bucket_bytes)
        reduced[stage] = StageGradients(groups[stage], buckets, optional)
    return reduced


def replica_groups(
    mesh: Mesh, schedule: Schedule, axis: str = REPLICAS
) -> dict[int, dist.ProcessGroup | None]:
    """Process groups of this rank with the replicas of each stage; all ranks call it together.

    A group spans the pp ranks that hold the stage and all replicas along an axis; None stands for
    one rank alone.

    Args:
        mesh: the grid of ranks.
        schedule: that of a step.
        axis: `REPLICAS`, `EXPERT_REPLICAS` for those of a stage's experts, or "cp" for the ranks of
            one data parallel replica.
    """
    groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    for ranks in sorted({schedule.ranks_of(stage) for stage in range(schedule.num_stages)}):
        if len(ranks) == 1:
            groups[ranks] = mesh.group(axis)
            continue
        groups[ranks] = group_of_lines(lines_of(mesh, ranks, axis), "a group of ranks with")
    return {stage: groups[schedule.ranks_of(stage)] for stage in range(schedule.num_stages)}
