"""Memory that a cluster has for every pp rank of a job."""

from __future__ import annotations

import math

from merak.core.errors import PlanError
from merak.plan.cluster.cluster import Cluster, Nodes
from merak.plan.cost.device import usable_bytes


def usable_by_pp_rank(cluster: Cluster, dp: int, tp: int, pp: int) -> tuple[float, ...]:
    """Bytes that tensors of each pp rank may fill: those of the smallest of its devices.

    Args:
        cluster: the devices; infinite where a profile does not know its memory.
        dp: data parallel degree.
        tp: tensor parallel degree.
        pp: pipeline parallel degree.

    Raises:
        PlanError: the job has more ranks than the cluster devices.
    """
    own = dp * tp
    if own * pp > cluster.num_devices:
        raise PlanError(
            f"dp={dp} × tp={tp} × pp={pp} are {own * pp} ranks, but the cluster has "
            f"{cluster.num_devices} devices; use smaller degrees or more nodes."
        )
    return tuple(
        min(_usable(nodes) for nodes in _nodes_of(cluster, own * rank, own * (rank + 1)))
        for rank in range(pp)
    )


def _nodes_of(cluster: Cluster, start: int, end: int) -> list[Nodes]:
    """Kinds of nodes that the ranks from `start` to before `end` are on."""
    found, first = [], 0
    for nodes in cluster.nodes:
        if first < end and start < first + nodes.num_devices:
            found.append(nodes)
        first += nodes.num_devices
    return found


def _usable(nodes: Nodes) -> float:
    memory = nodes.device.memory_bytes
    return math.inf if memory is None else usable_bytes(memory)
