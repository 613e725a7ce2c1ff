"""A cluster: nodes of devices, the link inside a node and the network between nodes."""

from __future__ import annotations

from dataclasses import dataclass

from merak.plan.cost.device import DeviceProfile


@dataclass(frozen=True, slots=True)
class Link:
    """Link of a device to others. A message of n bytes takes `latency_s` + n / `bytes_per_s`.

    Args:
        name: for people to read, such as "nvlink4" or "infiniband-ndr".
        latency_s: seconds of an empty message.
        bytes_per_s: achieved by one device in one direction, while the others of its node send too.
    """

    name: str
    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Nodes:
    """Equal nodes.

    Args:
        device: the speeds and memory of each device.
        devices_per_node: devices on one node.
        count: number of nodes.
        link: between the devices of a node.
        network: from a device of a node to those of other nodes.
    """

    device: DeviceProfile
    devices_per_node: int
    count: int
    link: Link
    network: Link

    @property
    def num_devices(self) -> int:
        """Devices of all these nodes."""
        return self.devices_per_node * self.count


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes of one or several kinds. Global rank r runs on device r, counted node by node.

    Args:
        nodes: the kinds of nodes, in the order of ranks.
    """

    nodes: tuple[Nodes, ...]

    @property
    def num_devices(self) -> int:
        """Devices of the cluster."""
        return sum(own.num_devices for own in self.nodes)

    def place(self, rank: int) -> tuple[Nodes, int]:
        """The kind of node of a rank, and the number of the node in the whole cluster.

        Args:
            rank: global, 0 … `num_devices` − 1.
        """
        before = 0
        for own in self.nodes:
            if rank < own.num_devices:
                return own, before + rank // own.devices_per_node
            rank -= own.num_devices
            before += own.count
        raise IndexError(rank)
