"""The choice of `hierarchical_reductions="auto"`: by the cost model, for the devices at hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import nn

from merak.core.announce import announce
from merak.core.mesh import REPLICAS, Mesh
from merak.core.rank0 import decide_on_rank0
from merak.engine.planning.devices import devices_here
from merak.plan.cluster.cluster import Cluster
from merak.plan.cluster.collectives import collective_seconds
from merak.plan.cluster.groups import group_of
from merak.plan.cluster.hierarchy import hierarchical_seconds, hierarchy_of, lines_of
from merak.plan.engine_options import EngineOptions

_SHARDED = ("reduce_scatter", "all_gather")
"""What replicas exchange with ZeRO."""


def choose_reductions(
    mesh: Mesh, model: nn.Module, options: EngineOptions, cluster: str | None, cache: Path | None
) -> EngineOptions:
    """Options without "auto" for hierarchical reductions; all ranks call it together.

    Args:
        mesh: of the job, laid out.
        model: whose gradients are reduced.
        options: as the user gives them.
        cluster: the devices, as of `parse_cluster`; None to find them out.
        cache: folder of profiles; None for none.
    """
    if options.hierarchical_reductions != "auto":
        return options
    chosen = "off"
    if options.trains and _may_have_levels(mesh):
        devices = devices_here(mesh, cluster, cache, None)
        is_faster = decide_on_rank0(
            mesh,
            "whether to reduce by hierarchy",
            lambda: devices is not None and is_hierarchy_faster(mesh, model, options, devices),
        )
        chosen = "on" if is_faster else "off"
        announce("hierarchical reductions: %s, as the cost model chooses", chosen)
    return replace(options, hierarchical_reductions=chosen)


def _may_have_levels(mesh: Mesh) -> bool:
    lines = [own for rank in range(mesh.pp) for own in lines_of(mesh, (rank,), REPLICAS)]
    return any(hierarchy_of(own, mesh.hosts) is not None for own in lines)


def is_hierarchy_faster(
    mesh: Mesh, model: nn.Module, options: EngineOptions, cluster: Cluster
) -> bool:
    """Whether replicas exchange a bucket faster by hierarchy than at once.

    Args:
        mesh: of the job.
        model: whose gradients are reduced.
        options: how it is laid out.
        cluster: the devices.
    """
    group = group_of(cluster, mesh.replicas, mesh.tp)
    sizes = (p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    num_bytes = min(options.bucket_bytes, sum(sizes) // (mesh.tp * mesh.pp))
    kinds = _SHARDED if options.zero else ("all_reduce",)
    at_once_s = sum(collective_seconds(kind, num_bytes, group) for kind in kinds)
    return sum(hierarchical_seconds(kind, num_bytes, group) for kind in kinds) < at_once_s
