"""Seconds of collectives by the α–β model: a message of n bytes takes α + n / β on its link.

A ring passes n − 1 shards of every rank on, an all-reduce twice as many; on several nodes it enters
and leaves each node through as many adapters as the group has ranks there. A double binary tree
takes as many bytes in fewer messages, and so do binomial trees of all ranks for an all-gather or
reduce-scatter of ranks on different nodes. A switch that can reduce takes every tensor once, and
between nodes with such switches NCCL reduces by hierarchy: the ranks of a node first, those of
equal numbers on all nodes then a shard each, at the same time, and the nodes gather last. The
fastest is taken, as NCCL does.

Sources: NCCL, src/graph/tuning.cc and doc/PERFORMANCE.md of nccl-tests (steps and bytes); Sanders,
Speck, Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan" (2009).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from merak.core.errors import PlanError
from merak.plan.cluster.cluster import Link
from merak.plan.cluster.groups import Group
from merak.plan.profile.profile import CollectiveTimes

_AT_ONCE = 8
"""Peers to which NCCL sends at a time. Source: NCCL, src/include/device.h."""

_TREE_FRACTION, _PAT_FRACTION = 0.92, 0.75
"""Of the bandwidth of a ring. Source: NCCL, src/graph/tuning.cc."""


def collective_seconds(kind: str, num_bytes: float, group: Group) -> float:
    """Seconds of one collective, by the fastest algorithm.

    Args:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all" or "broadcast".
        num_bytes: of the whole tensor: the reduced or gathered one; of an all-to-all the one whose
            shards all ranks hold together.
        group: the ranks and their links.

    Raises:
        PlanError: there is no such collective.
    """
    if kind not in _ALGORITHMS:
        raise PlanError(f"There is no collective {kind!r}; choose one of: {', '.join(KINDS)}.")
    if group.size == 1 or num_bytes <= 0:
        return 0.0
    measured = _measured(kind, num_bytes, group)
    return min(_ALGORITHMS[kind](num_bytes, group)) if measured is None else measured


def _measured(kind: str, num_bytes: float, group: Group) -> float | None:
    """Seconds by what was measured of such collectives; None where nothing was.

    Where groups of another size alone were measured, the algorithms' seconds are corrected by what
    was measured of the nearest size ÷ theirs.
    """
    link = group.link if group.num_nodes == 1 else group.network
    known = [
        own
        for own in (link.measured if link is not None else ())
        if own.kind == kind and (own.hosts > 1) == (group.num_nodes > 1)
    ]
    if not known:
        return None
    closest = min(known, key=lambda own: _distance(own, group))
    seconds = closest.seconds.seconds_at(num_bytes)
    if (closest.ranks, closest.hosts) == (group.size, group.num_nodes):
        return seconds
    share = math.ceil(closest.ranks / closest.hosts)
    like = replace(
        group,
        size=closest.ranks,
        num_nodes=closest.hosts,
        most_on_node=share,
        fewest_on_node=max(1, closest.ranks // closest.hosts),
        link=group.link if share > 1 else None,
    )
    own_s, like_s = (min(_ALGORITHMS[kind](num_bytes, one)) for one in (group, like))
    return seconds * own_s / like_s


def _distance(own: CollectiveTimes, group: Group) -> float:
    """How far a measured group is from another, by ratios of ranks and hosts."""
    ranks, hosts = own.ranks / group.size, own.hosts / group.num_nodes
    return abs(math.log(ranks)) + abs(math.log(hosts))


def send_seconds(num_bytes: float, link: Link) -> float:
    """Seconds of one message over a link."""
    return min(
        link.latency_s * latency + num_bytes / (link.bytes_per_s * rate)
        for latency, rate in _protocols(link)
    )


def _all_reduce(num_bytes: float, group: Group) -> Iterator[float]:
    for latency, rate in _group_protocols(group):
        yield _ring(2, num_bytes, group, latency, rate)
        yield _tree(num_bytes, group, latency, rate)
    if group.link is not None and group.link.switch_fraction:
        yield from _by_switch(num_bytes, group)
        if group.num_nodes > 1 and group.most_on_node > 1:
            yield from _by_hierarchy(num_bytes, group)


def _gather(num_bytes: float, group: Group) -> Iterator[float]:
    for latency, rate in _group_protocols(group):
        yield _ring(1, num_bytes, group, latency, rate)
    if group.network is not None and group.most_on_node == 1:
        # Binomial trees of all ranks at once, "PAT", which NCCL has for one rank on each node.
        passed = (group.size - 1) / group.size * num_bytes
        latency_s = math.ceil(math.log2(group.size)) * group.network.latency_s
        yield _start(group) + latency_s + passed / (group.bytes_per_s * _PAT_FRACTION)


def _broadcast(num_bytes: float, group: Group) -> Iterator[float]:
    """A chain, in which all ranks pass the tensor on piece by piece."""
    for latency, rate in _group_protocols(group):
        yield _start(group) + _hops(1, group, latency) + num_bytes / (group.bytes_per_s * rate)


def _all_to_all(num_bytes: float, group: Group) -> Iterator[float]:
    """Every rank sends a different piece of its shard to every other, to eight at a time."""
    shard = num_bytes / group.size
    inside = group.most_on_node
    seconds = 0.0
    if group.link is not None:
        seconds = math.ceil((inside - 1) / _AT_ONCE) * group.link.latency_s
        seconds += shard * (inside - 1) / group.size / group.link.bytes_per_s
    if group.network is not None:
        others = group.size - group.fewest_on_node
        outside = group.network.latency_s * math.ceil(others / _AT_ONCE)
        outside += shard * others / group.size / group.network.bytes_per_s
        seconds = max(seconds, outside)
    yield _start(group) + seconds


def _ring(rounds: int, num_bytes: float, group: Group, latency: float, rate: float) -> float:
    passed = rounds * (group.size - 1) / group.size * num_bytes
    return _start(group) + _hops(rounds, group, latency) + passed / (group.bytes_per_s * rate)


def _hops(rounds: int, group: Group, latency: float) -> float:
    """Latencies of a ring's messages, of which some cross from node to node."""
    outside = group.num_nodes - 1
    inside = group.size - 1 - outside
    inside_s = inside * group.link.latency_s if group.link is not None else 0.0
    outside_s = outside * group.network.latency_s if group.network is not None else 0.0
    return rounds * latency * (inside_s + outside_s)


def _tree(num_bytes: float, group: Group, latency: float, rate: float) -> float:
    """Two binary trees over the nodes, each for half of the bytes; chains inside the nodes."""
    inside_s = (group.most_on_node - 1) * group.link.latency_s if group.link is not None else 0.0
    levels = math.ceil(math.log2(group.num_nodes))
    outside_s = levels * group.network.latency_s if group.network is not None else 0.0
    passed = 2 * num_bytes / (group.bytes_per_s * rate * _TREE_FRACTION)
    return _start(group) + 2 * latency * (inside_s + outside_s) + passed


def _by_hierarchy(num_bytes: float, group: Group) -> Iterator[float]:
    """Reduce-scatter on the nodes, all-reduce between them, all-gather on the nodes."""
    if group.link is None or group.network is None or group.fewest_on_node != group.most_on_node:
        return
    inner = Group(group.most_on_node, 1, group.most_on_node, group.most_on_node, group.link, None)
    outer = Group(group.num_nodes, group.num_nodes, 1, 1, None, group.network)
    inside_s = 2 * min(_gather(num_bytes, inner))
    yield inside_s + min(_all_reduce(num_bytes / group.most_on_node, outer))


def _by_switch(num_bytes: float, group: Group) -> Iterator[float]:
    """Reduction inside the switch: every rank sends the tensor once, and a shard of the result."""
    link = group.link
    if link is None or group.num_nodes > 1:
        return
    passed = num_bytes * (1 + 1 / group.size)
    yield _SWITCH_S + passed / (link.bytes_per_s * link.switch_fraction)


_SWITCH_S = 25e-6
"""Latency of an all-reduce in the switch. Source: NCCL, src/graph/tuning.cc, NVLS."""


def _start(group: Group) -> float:
    return max(link.start_s for link in (group.link, group.network) if link is not None)


def _protocols(link: Link) -> tuple[tuple[float, float], ...]:
    return ((1.0, 1.0), *link.protocols)


def _group_protocols(group: Group) -> list[tuple[float, float]]:
    """Protocols that all links of a group have, with the least gain of each."""
    links = [_protocols(link) for link in (group.link, group.network) if link is not None]
    return [
        (max(latency for latency, _ in each), min(rate for _, rate in each)) for each in zip(*links)
    ]


_ALGORITHMS: Mapping[str, Callable[[float, Group], Iterator[float]]] = MappingProxyType(
    {
        "all_reduce": _all_reduce,
        "all_gather": _gather,
        "reduce_scatter": _gather,
        "all_to_all": _all_to_all,
        "broadcast": _broadcast,
    }
)

KINDS = tuple(_ALGORITHMS)
"""Names of the collectives."""
