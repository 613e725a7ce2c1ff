"""The order of a cluster's nodes: which kind of node has the first ranks of the job.

The ranks of a pipeline's first stages hold the activations of more microbatches than the last
ones, and the last stage has the loss: where nodes are unequal, it matters which come first.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from merak.core import units
from merak.plan.cluster.cluster import Cluster
from merak.plan.price.workload import Workload
from merak.plan.search.pinned import Pinned
from merak.plan.search.ranking import Ranking, Rejected
from merak.plan.search.search import search

MOST_KINDS = 3
"""Kinds of nodes of which all orders are tried; of more, the order of the file and its reverse."""

_WORTH = 0.005
"""Part of a step that another order than that of the file must save."""


@dataclass(frozen=True, slots=True)
class Ordered:
    """The plans of a job with its nodes in the best order.

    Args:
        cluster: the devices in that order.
        ranking: the plans.
        is_changed: whether that is another order than the one that was given.
    """

    cluster: Cluster
    ranking: Ranking
    is_changed: bool = False


def search_orders(workload: Workload, cluster: Cluster, pinned: Pinned, top: int = 5) -> Ordered:
    """Find the fastest plans of a job in any order of its nodes.

    Args:
        workload: the job.
        cluster: the devices in the order in which they were given.
        pinned: choices that are made already.
        top: plans that are wanted.

    Raises:
        PlanError: what is pinned contradicts the devices or the batch.
        TraceError: the model cannot be traced.
    """
    found = [
        Ordered(own, search(workload, own, pinned, top=top), number > 0)
        for number, own in enumerate(orders(cluster))
    ]
    best = given = found[0]
    for own in found[1:]:
        if _step_s(own) < _step_s(best) * (1.0 - _WORTH):
            best = own
    others = tuple(_slower(own) for own in found if own is not best)
    notes = best.ranking.notes
    if best.is_changed:
        notes = (*notes, _advice(best, given))
    rejected = (*best.ranking.rejected, *others)
    return replace(best, ranking=replace(best.ranking, rejected=rejected, notes=notes))


def orders(cluster: Cluster) -> list[Cluster]:
    """The orders of nodes that are tried, the given one first.

    Args:
        cluster: the devices; nodes of one kind stay together.
    """
    nodes = cluster.nodes
    if len(nodes) <= MOST_KINDS:
        return [replace(cluster, nodes=own) for own in itertools.permutations(nodes)]
    return [cluster, replace(cluster, nodes=nodes[::-1])]


def order_of(cluster: Cluster) -> str:
    """The nodes of a cluster in their order, as `parse_cluster` reads them."""
    return "+".join(
        f"{own.device.name}:{own.devices_per_node}x{own.count}" for own in cluster.nodes
    )


def _step_s(ordered: Ordered) -> float:
    plans = ordered.ranking.plans
    return plans[0].step_s if plans else float("inf")


def _slower(ordered: Ordered) -> Rejected:
    step_s = _step_s(ordered)
    why = "nothing fits" if step_s == float("inf") else f"a step takes {units.seconds(step_s)}"
    return Rejected(f"nodes in the order {order_of(ordered.cluster)}", why)


def _advice(best: Ordered, given: Ordered) -> str:
    before = _slower(given)
    return (
        f"the plans are for nodes in the order {order_of(best.cluster)}; in the given order, "
        f"{before.why}"
    )
