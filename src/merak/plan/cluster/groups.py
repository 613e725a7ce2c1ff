"""The slowest group of ranks of one axis of a job, and the link between two ranks.

Ranks are counted in the order (pp, dp, cp, tp), tp fastest: groups of tp have a stride of 1, those
of cp one of tp, replicas (dp and cp together) one of tp, those of pp one of dp · cp · tp. All
groups of an axis communicate at the same time, so those of one node share its network.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from merak.core.errors import PlanError
from merak.plan.cluster.cluster import Cluster, Link


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that communicate, and their links.

    Args:
        size: number of ranks.
        num_nodes: nodes that they are on.
        most_on_node: ranks on the node with most of them.
        fewest_on_node: ranks on the node with fewest.
        link: the slowest between ranks of one node; None where each rank has a node for itself.
        network: the slowest of one rank to another node, while all groups communicate; None where
            all ranks are on one node.
    """

    size: int
    num_nodes: int
    most_on_node: int
    fewest_on_node: int
    link: Link | None
    network: Link | None

    @property
    def bytes_per_s(self) -> float:
        """Rate at which a ring through all ranks passes data on, limited by its slowest place."""
        rates = [self.link.bytes_per_s] if self.link is not None else []
        if self.network is not None:
            rates.append(self.network.bytes_per_s * self.fewest_on_node)
        return min(rates, default=float("inf"))


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of the axes that collectives inside segments are over.

    Args:
        tp: the tensor parallel ranks.
        cp: the ranks that share tokens.
        ep: the replicas that have the experts of a layer between them.
        dp: the replicas that a model meets in its forward or its loss.
    """

    tp: Group
    cp: Group
    ep: Group
    dp: Group

    def of(self, axis: str) -> Group:
        """The group of an axis of the mesh."""
        group: Group = getattr(self, axis)
        return group


def groups_of(cluster: Cluster, tp: int, cp: int, ep: int = 1, dp: int = 1) -> Groups:
    """The slowest groups of the axes that collectives inside segments are over.

    Args:
        cluster: the devices.
        tp: tensor parallel degree.
        cp: context parallel degree.
        ep: expert parallel degree, over replicas where tp is 1.
        dp: data parallel degree, where a model meets other replicas.
    """
    experts = group_of(cluster, ep if tp == 1 else 1, 1)
    replicas = group_of(cluster, dp, cp * tp)
    return Groups(group_of(cluster, tp, 1), group_of(cluster, cp, tp), experts, replicas)


def group_of(cluster: Cluster, size: int, stride: int) -> Group:
    """The slowest group of an axis.

    Args:
        cluster: the devices; a job may use fewer of them than there are.
        size: ranks of a group, the degree of the axis.
        stride: distance of neighbours in the order of ranks.

    Raises:
        PlanError: one group alone needs more devices than the cluster has.
    """
    if size * stride > cluster.num_devices:
        raise PlanError(
            f"{size} ranks at a distance of {stride} need {size * stride} devices, but the cluster "
            f"has {cluster.num_devices}; use smaller degrees."
        )
    return _slowest_group(_kinds(cluster), size, stride)


def group_of_ranks(cluster: Cluster, lines: Iterable[Sequence[int]]) -> Group:
    """The slowest of some groups that communicate at the same time.

    Args:
        cluster: the devices.
        lines: global ranks of each group.
    """
    places = _places(_kinds(cluster))
    return min({_group([places[rank] for rank in line]) for line in lines}, key=_speed)


def send_link(cluster: Cluster, from_rank: int, to_rank: int, senders: int | None = None) -> Link:
    """The link that a message between two ranks takes.

    Args:
        cluster: the devices.
        from_rank: global rank that sends.
        to_rank: global rank that receives.
        senders: devices of the node that send to other nodes at the same time; None for all.
    """
    source, from_node = cluster.place(from_rank)
    target, to_node = cluster.place(to_rank)
    if from_node == to_node:
        return source.link
    networks = [own.network_of(senders or own.devices_per_node) for own in (source, target)]
    return _slowest(networks)


@dataclass(frozen=True, slots=True)
class _Kind:
    """Nodes of one kind, as far as their communication goes."""

    devices_per_node: int
    num_devices: int
    link: Link
    network: Link


def _kinds(cluster: Cluster) -> tuple[_Kind, ...]:
    return tuple(
        _Kind(own.devices_per_node, own.num_devices, own.link, own.network) for own in cluster.nodes
    )


@lru_cache(maxsize=64)
def _places(kinds: tuple[_Kind, ...]) -> list[tuple[int, int, _Kind]]:
    """Kind, node and its links of every device."""
    return [
        (index, node, kind)
        for index, kind in enumerate(kinds)
        for node in range(kind.num_devices // kind.devices_per_node)
        for _ in range(kind.devices_per_node)
    ]


@lru_cache(maxsize=1024)
def _slowest_group(kinds: tuple[_Kind, ...], size: int, stride: int) -> Group:
    places = _places(kinds)
    found = {
        _group(places[start : start + size * stride : stride])
        for start in _starts(kinds, size, stride)
    }
    return min(found, key=_speed)


def _starts(kinds: tuple[_Kind, ...], size: int, stride: int) -> Iterator[int]:
    """First ranks of the groups; of those that lie alike on equal nodes, one."""
    ends = list(accumulate(kind.num_devices for kind in kinds))
    seen = set()
    for block in range(0, ends[-1] - size * stride + 1, size * stride):
        index = next(index for index, end in enumerate(ends) if block < end)
        first = ends[index] - kinds[index].num_devices
        inside = block + size * stride <= ends[index]
        offset = (block - first) % kinds[index].devices_per_node
        key = (index, offset) if inside else (-1, block)
        if key not in seen:
            seen.add(key)
            yield from range(block, block + stride)


def _group(places: Sequence[tuple[int, int, _Kind]]) -> Group:
    on_node = Counter((index, node) for index, node, _ in places)
    kinds = {(index, node): kind for index, node, kind in places}
    links = [kinds[node].link for node, count in on_node.items() if count > 1]
    networks = [kind.network for kind in kinds.values()] if len(kinds) > 1 else []
    return Group(
        size=len(places),
        num_nodes=len(kinds),
        most_on_node=max(on_node.values()),
        fewest_on_node=min(on_node.values()),
        link=_slowest(links) if links else None,
        network=_slowest(networks) if networks else None,
    )


def _slowest(links: list[Link]) -> Link:
    return min(links, key=lambda link: (link.bytes_per_s, -link.latency_s))


def _speed(group: Group) -> tuple[float, int]:
    return group.bytes_per_s, -group.num_nodes
