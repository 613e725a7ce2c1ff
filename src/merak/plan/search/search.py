"""The search for the fastest plan of a job on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from merak.core.errors import MerakError
from merak.graph.tensor_parallel.report import undivided_weights
from merak.plan.cluster.cluster import Cluster
from merak.plan.price.candidate import Candidate
from merak.plan.price.price import Misfit, Price
from merak.plan.price.workload import Workload
from merak.plan.search.bounds import JobPricing, Pricing
from merak.plan.search.degrees import check_degrees
from merak.plan.search.explain import merge
from merak.plan.search.pinned import Pinned
from merak.plan.search.prune import memory_rejection
from merak.plan.search.rank import MOST_PRICED, Ranked, rank
from merak.plan.search.ranking import Cause, Ranking, Rejection
from merak.plan.search.space import Job, Space, searched_tp, space_of

_NEAREST = 8
"""Candidates that do not fit, and are priced where no candidate does."""

Refusal = Callable[[Candidate], str | None]
"""Says why a job cannot have a layout; None where it can."""


def search(
    workload: Workload,
    cluster: Cluster,
    pinned: Pinned | None = None,
    *,
    top: int = 5,
    most_priced: int = MOST_PRICED,
    refusal: Refusal | None = None,
) -> Ranking:
    """Find the fastest plans of a job that fit its devices.

    Args:
        workload: the job.
        cluster: the devices.
        pinned: choices that are made already.
        top: plans that are wanted.
        most_priced: candidates that may be priced.
        refusal: says which layouts the job cannot have, whatever the model; None for none.

    Raises:
        PlanError: what is pinned contradicts the devices or the batch.
        TraceError: the model cannot be traced.
    """
    pinned = Pinned() if pinned is None else pinned
    check_degrees(cluster.num_devices, workload.global_batch, pinned)  # before anything is traced
    pricing = JobPricing(workload, cluster, pinned.microbatch or 1)
    job = job_of(workload, cluster, pinned)
    found = search_job(job, pricing, pinned, top, most_priced, refusal)
    return replace(found, notes=tuple(_undivided(workload, job, pinned)))


def _undivided(workload: Workload, job: Job, pinned: Pinned) -> Iterator[str]:
    """What the degrees of tensor parallelism that are searched leave whole on every rank."""
    base = pinned.microbatch or 1
    degrees = dict[str, list[str]]()
    for tp in searched_tp(job, pinned):
        if tp > 1 and job.tp_problem(tp) is None:
            weights = undivided_weights(workload.graph(base), workload.rewrite(base, tp))
            if weights is not None:
                degrees.setdefault(weights, []).append(str(tp))
    for weights, own in degrees.items():
        several = f"{', '.join(own[:-1])} and {own[-1]} do" if len(own) > 1 else f"{own[0]} does"
        yield (
            f"tp={several} not divide the outputs of {weights}: every rank holds and computes "
            "them whole"
        )


def job_of(workload: Workload, cluster: Cluster, pinned: Pinned) -> Job:
    """What the space of a job depends on.

    Args:
        workload: the job.
        cluster: the devices.
        pinned: choices that are made already.
    """
    base = pinned.microbatch or 1
    return Job(
        num_devices=cluster.num_devices,
        devices_per_node=max(own.devices_per_node for own in cluster.nodes),
        global_batch=workload.global_batch,
        num_segments=len(workload.graph(base).segments),
        tp_problem=_tp_problem(workload, base),
        low_sums=workload.low_sums,
    )


def search_job(
    job: Job,
    pricing: Pricing,
    pinned: Pinned,
    top: int = 5,
    most_priced: int = MOST_PRICED,
    refusal: Refusal | None = None,
) -> Ranking:
    """Find the fastest plans of a job, given its prices.

    Args:
        job: what the space depends on.
        pricing: prices and bounds.
        pinned: choices that are made already.
        top: plans that are wanted.
        most_priced: candidates that may be priced.
        refusal: as of `search`.

    Raises:
        PlanError: what is pinned contradicts the devices or the batch.
    """
    space = space_of(job, pinned)
    refused = [] if refusal is None else _refused(space, refusal)
    found = rank(space.candidates, pricing, top, most_priced)
    reason = _refusal([*found.rejections, *([] if space.candidates else refused)], found)
    found.rejections.extend(refused)
    return Ranking(
        plans=tuple(found.plans),
        rejected=tuple(merge(found.rejections, space.rejected.values())),
        fits_nowhere=tuple(_nearest(found, pricing)),
        num_candidates=len(space.candidates),
        num_priced=found.num_priced,
        is_proved=found.is_proved,
        refusal=reason,
    )


def _refused(space: Space, refusal: Refusal) -> list[Rejection]:
    """Take the candidates out of a space that the job cannot have."""
    problems = [(own, refusal(own)) for own in space.candidates]
    space.candidates = [own for own, problem in problems if problem is None]
    return [Rejection(own, Cause.REFUSED, why) for own, why in problems if why is not None]


def _refusal(rejections: list[Rejection], found: Ranked) -> str | None:
    """The reason why nothing is allowed, as far as candidates were looked at."""
    refused = [own for own in rejections if own.cause is Cause.REFUSED]
    return refused[0].why if refused and not found.plans and not found.misfits else None


def _nearest(found: Ranked, pricing: Pricing) -> Iterator[Price]:
    """Prices of the candidates that are nearest to fitting; where some fit, those there are."""
    for number, own in enumerate(sorted(found.misfits, key=_excess)):
        if isinstance(own, Price):
            yield own
        elif not found.plans and number < _NEAREST:
            yield pricing.price(own.candidate)


def _excess(found: Price | Misfit) -> float:
    rejection = memory_rejection(found)
    return 0.0 if rejection is None else rejection.excess


def _tp_problem(workload: Workload, microbatch: int) -> Callable[[int], str | None]:
    def problem(tp: int) -> str | None:
        try:
            if tp > 1:
                workload.rewrite(microbatch, tp)
        except MerakError as error:
            return str(error).rstrip(".")
        return None

    return problem
