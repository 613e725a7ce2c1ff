"""Plans with fewer devices, which are faster where some wait for others.

More replicas than the batch feeds well, or more pp ranks than it fills, wait for one another; fast
nodes wait for slow ones. The search uses all devices. Here one kind of nodes after another is left
out, and from the best plan on, one degree after another is divided by two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from merak.core import units
from merak.core.errors import MerakError
from merak.plan.cluster.cluster import Cluster, Nodes
from merak.plan.price.candidate import Candidate
from merak.plan.price.price import Price
from merak.plan.price.workload import Workload
from merak.plan.search.bounds import Pricing
from merak.plan.search.explain import degrees
from merak.plan.search.neighbours import without_idle
from merak.plan.search.node_order import Ordered, order_of, search_orders
from merak.plan.search.pinned import Pinned
from merak.plan.search.ranking import Ranking, Rejected
from merak.plan.search.space import MOST_MICROBATCH

_WORTH = 0.005
"""Part of a step that a plan with fewer devices must save to be the first."""

_ENOUGH = 0.5
"""Part of a cluster's rate of computation that nodes must have to be tried alone."""

_NEARLY = 0.1
"""Part of a step that one with half of the devices may take longer, and is still named."""


def search_some(
    workload: Workload, cluster: Cluster, pinned: Pinned, top: int = 5
) -> Ordered | None:
    """Find plans with some devices of a cluster, where no layout has as many ranks as it has.

    Such a cluster has 7 devices for a batch of 3 samples.

    Args:
        workload: the job.
        cluster: the devices: half of them, a quarter and so on are tried.
        pinned: choices that are made already.
        top: plans that are wanted.

    Returns:
        The plans on the largest of these parts that has any; None where none has.
    """
    own = cluster
    while own.num_devices > len(own.nodes):
        own = half_cluster(own)
        try:
            found = search_orders(workload, own, pinned, top=top)
        except MerakError:  # pinned degrees take more devices
            return None
        if found.ranking.plans:
            note = (
                f"no layout uses all {units.counted(cluster.num_devices, 'device')}; the plans are "
                f"for {own.num_devices:,} of them"
            )
            ranking = replace(found.ranking, notes=(*found.ranking.notes, note))
            return replace(found, ranking=ranking)
    return None


def without_slow_nodes(workload: Workload, found: Ordered, pinned: Pinned, top: int = 5) -> Ordered:
    """The plans of a job without its slowest nodes, where the others are faster alone.

    Replicas and stages on slow devices hold up those on fast ones, or get little to do. One kind of
    nodes after another is left out, as long as that is faster.

    Args:
        workload: the job.
        found: its plans on all nodes.
        pinned: choices that are made already.
        top: plans that are wanted.
    """
    best, slower = found, None
    dtype = workload.autocast or workload.dtype
    while best.ranking.plans and len(best.cluster.nodes) > 1:
        rates = [own.device.flop_rate(dtype) for own in best.cluster.nodes]
        rest = _without(best.cluster, rates.index(min(rates)))
        if _rate(rest, dtype) < _ENOUGH * _rate(best.cluster, dtype):
            break
        try:
            other = search_orders(workload, rest, pinned, top=top)
        except MerakError:  # pinned degrees take more devices
            break
        step_s = min((own.step_s for own in other.ranking.plans), default=math.inf)
        if step_s >= best.ranking.plans[0].step_s * (1.0 - _WORTH):
            takes = f"a step takes {units.seconds(step_s)}"
            why = takes if math.isfinite(step_s) else "nothing fits"
            slower = Rejected(f"{order_of(rest)} alone", why)
            break
        best = other
    notes, rejected = best.ranking.notes, best.ranking.rejected
    if best is not found:
        all_s = units.seconds(found.ranking.plans[0].step_s)
        notes = (
            *notes,
            f"the plans are for {order_of(best.cluster)} alone, which are faster without the other "
            f"nodes; with all of them a step takes {all_s}",
        )
    if slower is not None:
        rejected = (*rejected, slower)
    return replace(best, ranking=replace(best.ranking, notes=notes, rejected=rejected))


def _without(cluster: Cluster, kind: int) -> Cluster:
    return replace(cluster, nodes=(*cluster.nodes[:kind], *cluster.nodes[kind + 1 :]))


def _rate(cluster: Cluster, dtype: torch.dtype) -> float:
    return sum(own.num_devices * own.device.flop_rate(dtype) for own in cluster.nodes)


def half_cluster(cluster: Cluster) -> Cluster:
    """A cluster with half of the nodes of every kind; of a single one, half of its devices.

    Args:
        cluster: the devices.
    """
    return replace(cluster, nodes=tuple(map(_half, cluster.nodes)))


def _half(own: Nodes) -> Nodes:
    if own.count > 1:
        return replace(own, count=own.count // 2)
    return replace(own, devices_per_node=max(1, own.devices_per_node // 2))


def with_fewer_devices(found: Ranking, pricing: Pricing, pinned: Pinned, top: int) -> Ranking:
    """The ranking with plans that leave devices unused, where these are faster.

    Half of the devices compute twice as long. So nothing is priced unless the best plan waits for
    half of its step, about.

    Args:
        found: the ranking of plans with all devices, maybe without one.
        pricing: prices of the job's candidates.
        pinned: choices that are made already.
        top: plans that are wanted.
    """
    if not found.plans:
        return found
    before = best = found.plans[0]
    plans, num_priced = list(found.plans), 0
    while True:
        smaller = list(_priced_smaller(best, pricing, pinned))
        num_priced += len(smaller)
        fastest = min(smaller, key=lambda own: own.step_s, default=None)
        if fastest is None or fastest.step_s >= best.step_s * (1.0 - _WORTH):
            break
        best = fastest
        plans.insert(0, best)
    return replace(
        found,
        plans=tuple(plans[:top]),
        notes=(*found.notes, *_notes(before, best, fastest)),
        num_candidates=found.num_candidates + num_priced,
        num_priced=found.num_priced + num_priced,
    )


def _priced_smaller(best: Price, pricing: Pricing, pinned: Pinned) -> Iterator[Price]:
    """Prices of plans with half of the devices that may be nearly as fast, and fit."""
    most_s = best.step_s * (1.0 + _NEARLY)
    for own in _smaller(best.candidate, pinned):
        try:
            if pricing.bound_s(own) <= most_s:
                price = pricing.price(own)
                if price.fits and price.step_s <= most_s:
                    yield price
        except MerakError:  # fewer pp ranks may not have the schedule, and less tp not the memory
            continue


def _smaller(own: Candidate, pinned: Pinned) -> Iterator[Candidate]:
    """A candidate with half of one degree that is not pinned."""
    for axis in ("dp", "pp", "tp"):
        degree = getattr(own, axis)
        if degree % 2 or getattr(pinned, axis) is not None:
            continue
        if axis == "pp" and not pinned.frees_pp(own.pp):
            continue
        if axis == "tp" and own.ep > 1:
            continue
        half = replace(own, **{axis: degree // 2}, partition=pinned.partition)
        if half.tp == 1 and half.replicas % half.ep:
            continue  # fewer replicas than have the experts between them
        if axis != "dp":
            yield without_idle(half)
            continue
        yield without_idle(replace(half, num_microbatches=2 * own.num_microbatches))
        if pinned.microbatch is None and 2 * own.microbatch <= MOST_MICROBATCH:
            yield without_idle(replace(half, microbatch=2 * own.microbatch))


def _notes(before: Price, best: Price, last: Price | None) -> Iterator[str]:
    """Sentences on fewer devices: the first plan has them, or half would do nearly as well."""
    if best is not before:
        yield (
            f"the first plan uses {best.candidate.world_size:,} of the "
            f"{units.counted(before.candidate.world_size, 'device')}, which is faster for this "
            f"batch; with all of them a step takes {units.seconds(before.step_s)} "
            f"({degrees(before.candidate)})"
        )
    if last is not None and last is not best:
        yield (
            f"{units.counted(last.candidate.world_size, 'device')} would do nearly as well: "
            f"{units.seconds(last.step_s)} a step with {degrees(last.candidate)}"
        )
