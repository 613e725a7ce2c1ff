"""The smallest cluster that would do for a job that fits nowhere on the devices it has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from merak.core.errors import MerakError
from merak.core.units import counted
from merak.plan.cluster.cluster import Cluster
from merak.plan.price.candidate import Candidate
from merak.plan.price.price import Price
from merak.plan.price.workload import Workload
from merak.plan.recompute_spec import RECOMPUTES
from merak.plan.search.bounds import JobPricing
from merak.plan.search.explain import describe
from merak.plan.search.pinned import Pinned
from merak.plan.search.prune import state_rejection
from merak.plan.search.ranking import Ranking
from merak.plan.search.search import context_degrees, job_of
from merak.plan.search.space import space_of
from merak.schedule.ir import USUAL

MOST_DEVICES = 2**17
"""Largest cluster that is tried."""

_NODE = 8
"""Devices of a usual node: a smaller one grows before there are several."""

_TRIES = 6
"""Candidates that are priced on a cluster: those with the least memory."""


def smallest_cluster(workload: Workload, cluster: Cluster, pinned: Pinned) -> Price | None:
    """Find the smallest cluster, of 2, 4, 8, … times as many devices, that holds a job.

    Args:
        workload: the job.
        cluster: on which it fits nowhere.
        pinned: choices that are made already; degrees are left as they are.

    Returns:
        The price of a plan there, not the fastest; None where there is none.
    """
    for larger in _larger(cluster):
        for price in _leanest(workload, larger, pinned):
            if price.fits:
                return price
    return None


def fits_nowhere(
    what: str,
    where: str,
    workload: Workload,
    cluster: Cluster,
    pinned: Pinned,
    ranking: Ranking,
) -> str:
    """The sentence on a job that has no plan.

    Args:
        what: the job, for people.
        where: its devices, for people.
        workload: the job.
        cluster: its devices.
        pinned: choices that are made already.
        ranking: of a search without plans.
    """
    if ranking.refusal is not None:
        return f"{ranking.refusal.rstrip('.')}."
    named = f" with {pinned}" if str(pinned) else ""
    reasons = [own for own in ranking.rejected if own.count] or ranking.rejected
    nearest = f" ({reasons[0].what}: {reasons[0].why})" if reasons else ""
    found = smallest_cluster(workload, cluster, pinned)
    if found is None:
        fix = "no number of such devices would do; use a smaller batch or pin less"
    else:
        fix = (
            f"the smallest of 2, 4, 8, … times as many that would do has "
            f"{counted(found.candidate.world_size, 'device')}, with {describe(found.candidate)}"
        )
    return f"{what} fits nowhere on {where}{named}{nearest}; {fix}."


def _larger(cluster: Cluster) -> Iterator[Cluster]:
    while cluster.num_devices * 2 <= MOST_DEVICES:
        *others, last = cluster.nodes
        if last.count == 1 and last.devices_per_node * 2 <= _NODE:
            last = replace(last, devices_per_node=last.devices_per_node * 2)
        else:
            last = replace(last, count=last.count * 2)
        cluster = Cluster((*others, last))
        yield cluster


def _leanest(workload: Workload, cluster: Cluster, pinned: Pinned) -> Iterator[Price]:
    """Prices of the candidates with the least memory; those with cp where the others do not fit."""
    job = job_of(workload, cluster, pinned)
    pricing = JobPricing(workload, cluster, pinned.microbatch or 1)
    contexts = context_degrees(job) if pinned.leaves_context else ()
    for cps in ((1,), contexts):
        try:
            candidates = space_of(replace(job, cps=cps), pinned).candidates
        except MerakError:
            return
        own = [one for one in candidates if _is_lean(one, pinned)]
        own = [one for one in own if state_rejection(one, pricing) is None]
        own.sort(key=pricing.rough_bytes)
        of_degrees: dict[tuple[int, int, int, int], Candidate] = {}
        for one in own:
            of_degrees.setdefault((one.dp, one.tp, one.pp, one.cp), one)
        for one in list(of_degrees.values())[:_TRIES]:
            try:
                yield pricing.price(one)
            except MerakError:
                continue


def _is_lean(own: Candidate, pinned: Pinned) -> bool:
    """Whether a candidate takes the least memory of those with its degrees and ZeRO stage."""
    shards = pinned.sequence_parallel
    if shards is None:
        shards = pinned.sub_pipelining != "on" and own.cp == 1
    return (
        own.recompute == (RECOMPUTES[-1] if pinned.recompute is None else pinned.recompute)
        and own.microbatch == (pinned.microbatch or 1)
        and own.schedule == (pinned.schedule or USUAL)
        and own.sequence_parallel == (shards and own.tp > 1)
    )
