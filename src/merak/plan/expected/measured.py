"""A cluster as a job's own steps have measured it, in place of what its price was made with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from merak.plan.cluster.cluster import Cluster, Link, Nodes
from merak.plan.cluster.groups import group_of
from merak.plan.cost.device import DeviceProfile
from merak.plan.price.candidate import Candidate
from merak.plan.price.step import Boundary, StepParts

_SAME = math.log(1.05)
"""Devices whose times differ by less than this step of their logarithm count as equal."""

_LEAST = 0.1
"""A part of a priced time: less than that is not believed, as it may have been hidden."""


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Measured seconds of one rank, the medians of some steps.

    Args:
        step_s: from the beginning of a step to that of the next.
        busy_s: of all of its actions, without waits for other pp ranks.
        reduction_s: from its last action until its gradients are reduced.
        update_s: of its optimizer's step; 0 where it made none.
        transfers_s: by the stage before a boundary, of an output that travels over it.
    """

    step_s: float
    busy_s: float
    reduction_s: float
    update_s: float = 0.0
    transfers_s: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Slowness:
    """Measured seconds ÷ priced ones.

    Args:
        computation: of every rank's segments. Those of tp ranks contain what they exchange.
        updates: of every rank's optimizer step.
        transfers: of all boundaries that lie on a link, by whether it is the network.
        reductions: of gradients, by whether they take the network.
    """

    computation: tuple[float, ...]
    updates: tuple[float, ...]
    transfers: Mapping[bool, float]
    reductions: Mapping[bool, float]


def slowness_of(
    cluster: Cluster, candidate: Candidate, parts: StepParts, ranks: Sequence[RankTimes]
) -> Slowness:
    """Compare the measured times of a job with their price.

    Args:
        cluster: that was priced.
        candidate: the layout of the job.
        parts: of its price.
        ranks: of every rank.
    """
    size = candidate.stage_ranks
    computation = tuple(_ratio(r.busy_s, parts.busy_s[n // size]) for n, r in enumerate(ranks))
    updates = computation
    if parts.updates_s and all(own.update_s for own in ranks):
        updates = tuple(_ratio(r.update_s, parts.updates_s[n // size]) for n, r in enumerate(ranks))
    transfers: dict[bool, list[float]] = {}
    for stage, own in enumerate(parts.boundaries):
        found = [rank.transfers_s[stage] for rank in ranks if stage in rank.transfers_s]
        if found and own.ranks[0] != own.ranks[1]:
            ratio = _ratio(median(found), _transfer_s(own))
            transfers.setdefault(_crosses(cluster, own.ranks), []).append(ratio)
    reductions = list(_reductions(candidate, parts, ranks))
    on_network = group_of(cluster, candidate.replicas, candidate.tp).num_nodes > 1
    return Slowness(
        computation,
        updates,
        {network: median(ratios) for network, ratios in transfers.items()},
        {on_network: median(reductions)} if reductions else {},
    )


def _ratio(measured_s: float, priced_s: float) -> float:
    return measured_s / priced_s if measured_s > 0 and priced_s > 0 else 1.0


def _transfer_s(boundary: Boundary) -> float:
    return boundary.link.latency_s + boundary.num_bytes / boundary.link.bandwidth_bytes_per_s


def _crosses(cluster: Cluster, ranks: Sequence[int]) -> bool:
    return len({cluster.place(rank)[1] for rank in ranks}) > 1


def _reductions(
    candidate: Candidate, parts: StepParts, ranks: Sequence[RankTimes]
) -> Iterable[float]:
    """Of every pp rank, its whole reduction as it was measured ÷ its price.

    The rank that comes last waits for none of the others. What the price hides beside the backward
    was hidden.
    """
    size = candidate.stage_ranks
    if candidate.replicas == 1:
        return
    for rank, own in enumerate(parts.exchanges):
        if own is not None and own.unhidden_reduction_s > 0:
            whole_s = own.unhidden_reduction_s
            hidden_s = max(0.0, whole_s - own.reduction_s)
            behind_s = min(r.reduction_s for r in ranks[rank * size : (rank + 1) * size])
            yield max(_LEAST, (hidden_s + behind_s) / whole_s)


def measured_cluster(cluster: Cluster, parts: StepParts, slowness: Slowness) -> Cluster:
    """The cluster as it was measured, for another search.

    Args:
        cluster: that was priced.
        parts: of the price of the layout that was measured.
        slowness: of it.
    """
    steps = [tuple(map(_step, own)) for own in zip(slowness.computation, slowness.updates)]
    known: dict[tuple[int, tuple[int, ...]], DeviceProfile] = {}

    def device(nodes: Nodes, step: tuple[int, ...]) -> DeviceProfile:
        key = id(nodes.device), step
        if key not in known:
            known[key] = nodes.device.slowed(*(math.exp(_SAME * own) for own in step))
        return known[key]

    devices, nodes, before = [], [], 0
    for own in cluster.nodes:
        mine = steps[before : before + own.num_devices]
        before += own.num_devices
        devices += [device(own, step) for step in mine]
        link = _corrected(own.link, False, parts, slowness, cluster)
        network = _corrected(own.network, True, parts, slowness, cluster)
        nodes.append(replace(own, device=device(own, min(mine)), link=link, network=network))
    return Cluster(tuple(nodes), tuple(devices) if len(set(steps)) > 1 else ())


def _step(ratio: float) -> int:
    return round(math.log(ratio) / _SAME)


def _corrected(
    link: Link, is_network: bool, parts: StepParts, slowness: Slowness, cluster: Cluster
) -> Link:
    """A link with the latency or the rate that transfers and reductions were measured with.

    Of a message whose bytes are most of its price, the rate was wrong; else the latency was.
    """
    ratio = slowness.transfers.get(is_network)
    if ratio is not None:
        own = max(
            (own for own in parts.boundaries if _crosses(cluster, own.ranks) == is_network),
            key=_transfer_s,
        )
        priced_s, bytes_s = _transfer_s(own), own.num_bytes / own.link.bandwidth_bytes_per_s
        if 2 * bytes_s > priced_s:
            found_s = max(ratio * priced_s - own.link.latency_s, _LEAST * ratio * priced_s)
            link = replace(link, bytes_per_s=link.bytes_per_s * bytes_s / found_s)
        else:
            extra_s = (ratio - 1) * priced_s
            link = replace(link, latency_s=max(0.0, link.latency_s + extra_s))
    ratio = slowness.reductions.get(is_network)
    if ratio is not None and link.measured:
        known = tuple(replace(own, seconds=own.seconds.times(ratio)) for own in link.measured)
        link = replace(link, measured=known)
    elif ratio is not None:
        link = replace(link, bytes_per_s=link.bytes_per_s / ratio)
    return link
