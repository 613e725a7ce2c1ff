"""Memory that a cluster has for every pp rank of a job, and for the ranks of every node."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class HostUse:
    """Host memory that the ranks of a node take.

    Args:
        num_ranks: of the node.
        needed_bytes: that they take, beside their processes.
        usable_bytes: that the node has for that; None where it is not known.
    """

    num_ranks: int = 0
    needed_bytes: int = 0
    usable_bytes: int | None = None

    @property
    def fits(self) -> bool:
        """Whether the node has so much."""
        return self.usable_bytes is None or self.needed_bytes <= self.usable_bytes


def fullest_host(cluster: Cluster, mesh: Mesh, host_bytes: Sequence[int]) -> HostUse:
    """The node that has the least host memory left, or takes the most where that is not known.

    Args:
        cluster: the devices.
        mesh: of the job.
        host_bytes: of a rank in host memory, by pp rank.
    """
    size, first = mesh.replicas * mesh.tp, 0
    found = list[HostUse]()
    for nodes in cluster.nodes if any(host_bytes) else ():
        for _ in range(nodes.count):
            ranks = range(first, min(first + nodes.devices_per_node, mesh.world_size))
            first += nodes.devices_per_node
            needed = sum(
                host_bytes[pp]
                * len(range(max(ranks.start, pp * size), min(ranks.stop, pp * size + size)))
                for pp in range(ranks.start // size, -(-ranks.stop // size))
            )
            found.append(HostUse(len(ranks), needed, nodes.usable_host_bytes))
    return max(found, key=_excess, default=HostUse())


def _excess(own: HostUse) -> tuple[float, int]:
    most = math.inf if own.usable_bytes is None else own.usable_bytes
    return own.needed_bytes - most, own.needed_bytes


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
