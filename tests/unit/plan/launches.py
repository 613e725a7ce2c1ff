"""Clusters whose hosts launch kernels at once, or slowly."""

from __future__ import annotations

from dataclasses import replace

from merak.plan.cluster.cluster import Cluster


def launched_in(cluster: Cluster, launch_s: float) -> Cluster:
    """A cluster whose hosts need so long for a kernel."""
    nodes = []
    for node in cluster.nodes:
        assert node.device.efficiency is not None
        efficiency = replace(node.device.efficiency, launch_s=launch_s)
        nodes.append(replace(node, device=replace(node.device, efficiency=efficiency)))
    return replace(cluster, nodes=tuple(nodes))
