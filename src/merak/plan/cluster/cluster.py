"""A cluster: nodes of devices, the link inside a node and the network between nodes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from merak.core.doctor.memory import FEWEST_BYTES
from merak.plan.cost.device import DeviceProfile
from merak.plan.profile.profile import CollectiveTimes


@dataclass(frozen=True, slots=True)
class Link:
    """Link of a device to others. A message of n bytes takes `latency_s` + n / `bytes_per_s`.

    Args:
        name: for people to read, such as "nvlink4" or "infiniband-ndr".
        latency_s: seconds of an empty message.
        bytes_per_s: achieved by one device in one direction, while the others of its node send too.
        protocols: ways to send a small message faster and a large one slower, each as factors of
            `latency_s` and `bytes_per_s`; NCCL's "LL" and "LL128".
        start_s: seconds that a collective takes beyond its messages.
        switch_fraction: rate at which a switch reduces, as a factor of `bytes_per_s`; 0 where it
            cannot.
        measured: seconds of collectives over it, which replace those of the algorithms.
        interference: part of a hidden collective's time that computation beside it takes longer;
            None where it was not measured.
    """

    name: str
    latency_s: float
    bytes_per_s: float
    protocols: tuple[tuple[float, float], ...] = ()
    start_s: float = 0.0
    switch_fraction: float = 0.0
    measured: tuple[CollectiveTimes, ...] = ()
    interference: float | None = None


@dataclass(frozen=True, slots=True)
class Nodes:
    """Nodes of a cluster with the same devices, links and network.

    Args:
        device: the speeds and memory of each device.
        devices_per_node: devices on one node.
        count: number of nodes.
        link: between the devices of a node.
        network: from a device of a node to those of other nodes.
        adapters: network adapters of a node, which its devices share evenly.
        dollars_per_hour: price of one device for one hour; None where it is not known.
        host_memory_bytes: of a node, for all of its ranks; None where it is not known.
    """

    device: DeviceProfile
    devices_per_node: int
    count: int
    link: Link
    network: Link
    adapters: int | None = None
    dollars_per_hour: float | None = None
    host_memory_bytes: int | None = None

    @property
    def usable_host_bytes(self) -> int | None:
        """Host memory of a node beside the processes of its ranks; None where it is not known."""
        if self.host_memory_bytes is None:
            return None
        return max(0, self.host_memory_bytes - self.devices_per_node * FEWEST_BYTES)

    @property
    def num_devices(self) -> int:
        """Devices of all these nodes."""
        return self.devices_per_node * self.count

    def network_of(self, senders: int) -> Link:
        """Network of one device while that many devices of its node send.

        Args:
            senders: 1 … `devices_per_node`. They use at most one adapter each.
        """
        share = self.devices_per_node / senders
        if self.adapters is not None:
            share = max(1.0, min(share, self.devices_per_node / self.adapters))
        else:
            share = 1.0
        return replace(self.network, bytes_per_s=self.network.bytes_per_s * share)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes of one or several kinds. Global rank r runs on device r, counted node by node.

    Args:
        nodes: the kinds of nodes, in the order of ranks.
        measured: the device of every rank, where ranks of equal devices were measured to differ;
            their nodes then have the fastest. Empty where ranks have the devices of their nodes.
    """

    nodes: tuple[Nodes, ...]
    measured: tuple[DeviceProfile, ...] = ()

    @property
    def devices(self) -> tuple[DeviceProfile, ...]:
        """The kinds of devices, in the order of ranks."""
        return tuple(own.device for own in self.nodes)

    @property
    def dollars_per_hour(self) -> float | None:
        """Price of all devices for one hour; None where that of one is not known."""
        prices = [own.dollars_per_hour for own in self.nodes]
        if any(price is None for price in prices):
            return None
        return sum(own.num_devices * (own.dollars_per_hour or 0.0) for own in self.nodes)

    @property
    def num_devices(self) -> int:
        """Devices of the cluster."""
        return sum(own.num_devices for own in self.nodes)

    def devices_of(self, ranks: range) -> list[DeviceProfile]:
        """The kinds of devices of some ranks.

        Args:
            ranks: global ones, one after another.
        """
        if self.measured:
            return list(self.measured[ranks.start : ranks.stop])
        found, before = [], 0
        for own in self.nodes:
            if before < ranks.stop and ranks.start < before + own.num_devices:
                found.append(own.device)
            before += own.num_devices
        return found

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
