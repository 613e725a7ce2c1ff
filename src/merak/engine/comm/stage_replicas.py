"""The replicas of a stage: who sums its gradients, and which gradients those are."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import nn

from merak.core.health.status import waiting_for_all
from merak.core.mesh import Mesh
from merak.engine.comm.gradient_buckets import StageGradients, fill_buckets
from merak.engine.local_programs import Programs
from merak.graph.trace.branches.flags import optional_parameters
from merak.schedule.ir import Schedule


def reduced_of(
    programs: Programs,
    schedule: Schedule,
    parameters: Mapping[str, nn.Parameter],
    shared: frozenset[str],
    bucket_bytes: int,
) -> dict[int, StageGradients]:
    """What is reduced of each of this rank's stages; called alike on every rank.

    Args:
        programs: what this rank runs.
        schedule: which ranks hold which stage.
        parameters: this rank's parameters by name.
        shared: those that several segments read; the stage of the first one reduces them.
        bucket_bytes: a reduction starts as soon as it has so many bytes.
    """
    groups = replica_groups(programs.mesh, schedule)
    reduced = {}
    for stage in programs.own_stages:
        names = _names(stage, programs, shared)
        own = [parameters[name] for name in names if not parameters[name].is_meta]
        group = groups[schedule.ranks_of(stage)]
        optional = frozenset(
            id(parameters[name])
            for program in programs.base.stages[stage].segments
            for name in optional_parameters(program.segment)
        )
        reduced[stage] = StageGradients(group, fill_buckets(own, bucket_bytes), optional)
    return reduced


def _names(stage: int, programs: Programs, shared: frozenset[str]) -> list[str]:
    """A stage's parameters in the order in which the backward completes their gradients."""
    segments = [program.segment for program in programs.base.stages[stage].segments]
    every = [name for segment in reversed(segments) for name in segment.parameters]
    owned = [n for n in dict.fromkeys(every) if n in shared and min(programs.owners[n]) == stage]
    return [name for name in every if name not in shared] + owned


def replica_groups(
    mesh: Mesh, schedule: Schedule
) -> dict[tuple[int, ...], dist.ProcessGroup | None]:
    """The process group of this rank for every set of pipeline positions that share a stage.

    A group spans these positions and all data parallel replicas; None stands for one rank alone.
    """
    groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    for ranks in sorted({schedule.ranks_of(stage) for stage in range(schedule.num_stages)}):
        if len(ranks) == 1:
            groups[ranks] = mesh.group("dp")
            continue
        lines = [
            [(p * mesh.dp + d) * mesh.tp + t for p in ranks for d in range(mesh.dp)]
            for t in range(mesh.tp)
        ]
        with waiting_for_all("a group of ranks with"):
            groups[ranks], _ = dist.new_subgroups_by_enumeration(lines)
    return groups
