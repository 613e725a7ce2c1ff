"""Memory that a cluster has for every pp rank of a job."""

from __future__ import annotations

import math

from merak.core.errors import PlanError
from merak.core.mesh import Mesh
from merak.plan.cluster.cluster import Cluster, Nodes
from merak.plan.cost.device import DeviceProfile
from merak.plan.memory.non_tensor import NonTensorMemory, non_tensor_memory, usable_bytes


def usable_by_pp_rank(cluster: Cluster, mesh: Mesh) -> tuple[float, ...]:
    """Bytes that tensors of each pp rank may fill: those of the smallest of its devices.

    Args:
        cluster: the devices; infinite where a profile does not know its memory.
        mesh: of the job.

    Raises:
        PlanError: the job has more ranks than the cluster devices.
    """
    dp, own = mesh.replicas, mesh.replicas * mesh.tp
    if mesh.world_size > cluster.num_devices:
        raise PlanError(
            f"dp={dp} × tp={mesh.tp} × pp={mesh.pp} are {mesh.world_size} ranks, but the cluster "
            f"has {cluster.num_devices} devices; use smaller degrees or more nodes."
        )
    return tuple(
        min(
            usable_on(nodes.device, mesh)
            for nodes in _nodes_of(cluster, own * rank, own * (rank + 1))
        )
        for rank in range(mesh.pp)
    )


def _nodes_of(cluster: Cluster, start: int, end: int) -> list[Nodes]:
    """Kinds of nodes that the ranks from `start` to before `end` are on."""
    found, first = [], 0
    for nodes in cluster.nodes:
        if first < end and start < first + nodes.num_devices:
            found.append(nodes)
        first += nodes.num_devices
    return found


def usable_on(device: DeviceProfile, mesh: Mesh | None = None) -> float:
    """Bytes that tensors of a job may fill on a device; infinite where its memory is not known.

    Args:
        device: of a rank.
        mesh: of the job; None for one rank, which has no communicators.
    """
    if device.tensor_bytes is not None:
        return device.tensor_bytes
    if device.memory_bytes is None:
        return math.inf
    return usable_bytes(device.memory_bytes, mesh, device.communicator_bytes)


def non_tensor_on(device: DeviceProfile, mesh: Mesh) -> NonTensorMemory | None:
    """Memory of a device that holds no tensor of a job; None where its memory is not known.

    Args:
        device: of a rank.
        mesh: of the job.
    """
    if device.memory_bytes is None:
        return None
    return non_tensor_memory(device.memory_bytes, mesh, device.communicator_bytes)
