"""The search for the fastest plan of a job on a cluster."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache

from merak.core.errors import MerakError, ScheduleError
from merak.core.garbage import paused_collector
from merak.graph.ir.ir import ModelGraph
from merak.graph.segment.buffer_kinds import DIFFERS, classify_written_buffers
from merak.graph.tensor_parallel.report import (
    dividing_degrees,
    undivided_sentence,
    undivided_weights,
)
from merak.graph.tensor_parallel.search.experts import num_experts
from merak.plan.cluster.cluster import Cluster
from merak.plan.gradient_compression import AUTO, CHOSEN_BY_PRICE
from merak.plan.layout import few_segments
from merak.plan.optimizer.home import HOST
from merak.plan.price.advice import slow_choices
from merak.plan.price.candidate import Candidate, Form
from merak.plan.price.price import Misfit, Price
from merak.plan.price.workload import Workload
from merak.plan.search.bounds import JobPricing, Pricing
from merak.plan.search.degrees import check_degrees
from merak.plan.search.explain import merge
from merak.plan.search.pinned import Pinned
from merak.plan.search.prune import memory_rejection
from merak.plan.search.rank import MOST_PRICED, Ranked, rank
from merak.plan.search.ranking import Cause, Ranking, Refusal, Rejected, Rejection
from merak.plan.search.space import Job, Space, searched_tp, space_of
from merak.plan.search.variants import MOST_CP, try_context, with_variants

_COMPRESSION_SAVES = 0.05
"""Part of a step that a compression must save to be chosen, since it changes gradients."""

_NEAREST = 8
"""Candidates that do not fit, and are priced where no candidate does."""


@paused_collector()
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

    A job's `gradient_compression="auto"` becomes the kind with which its fastest plan is fastest.

    Raises:
        PlanError: what is pinned contradicts the devices or the batch.
        ShardError: a pinned cp or ep does not fit the model.
        TraceError: the model cannot be traced.
    """
    pinned = Pinned() if pinned is None else pinned
    if workload.common.gradient_compression != AUTO:
        return _search(workload, cluster, pinned, top, most_priced, refusal)
    found = {
        kind: _search(workload.with_compression(kind), cluster, pinned, top, most_priced, refusal)
        for kind in ("off", *CHOSEN_BY_PRICE)
    }
    step_s = {kind: own.plans[0].step_s for kind, own in found.items() if own.plans}
    least_s = (1.0 - _COMPRESSION_SAVES) * step_s.get("off", math.inf)
    kind = min(step_s, key=lambda own: step_s[own], default="off")
    kind = kind if step_s.get(kind, math.inf) < least_s else "off"
    workload.common = replace(workload.common, gradient_compression=kind)
    times = ", ".join(f"{own_s:.3g} s with {own!r}" for own, own_s in step_s.items())
    note = f"gradient_compression={kind!r}: the fastest step takes {times}"
    return replace(found[kind], notes=(*found[kind].notes, note))


def _search(
    workload: Workload,
    cluster: Cluster,
    pinned: Pinned,
    top: int,
    most_priced: int,
    refusal: Refusal | None,
) -> Ranking:
    """The plans of a job whose gradients are compressed as it says."""
    check_degrees(cluster.num_devices, workload.global_batch, pinned)  # before anything is traced
    pricing = JobPricing(workload, cluster, pinned.microbatch or 1)
    workload.rewrite(  # refuses pinned degrees that the model cannot have, whatever the rest
        Form(
            pricing.base,
            pinned.tp if pinned.ep and pinned.tp else 1,
            cp=pinned.cp or 1,
            ep=pinned.ep or 1,
        )
    )
    job = job_of(workload, cluster, pinned)
    refusal = _with_copies(refusal, workload.graph(pricing.base), pinned)
    found = search_job(job, pricing, pinned, top, most_priced, refusal)
    if pinned.leaves_context and found.plans:
        found = _with_context(found, job, pricing, pinned, top, most_priced, refusal)
    elif pinned.leaves_context and found.refusal is None:
        of_context = replace(job, cps=context_degrees(job))
        with_context = search_job(of_context, pricing, pinned, top, most_priced, refusal)
        if with_context.plans:
            found = with_context
    if not found.plans and found.refusal is None and pinned.offload_optimizer is None:
        away = Pinned(**pinned.choices, offload_optimizer=HOST)
        with_host = search_job(job, pricing, away, top, most_priced, refusal)
        found = with_host if with_host.plans else found
    found = with_variants(found, pricing, pinned, top, refusal)
    notes = list(_undivided(workload, job, pinned))
    if found.plans:
        notes.extend(slow_choices(found.plans[0], workload))
    return replace(found, notes=tuple(notes))


def _with_context(
    found: Ranking,
    job: Job,
    pricing: Pricing,
    pinned: Pinned,
    top: int,
    most_priced: int,
    refusal: Refusal | None,
) -> Ranking:
    """The ranking with plans of the context parallel degree that is fastest from its best plan."""
    if pinned.sub_pipelining == "on":
        return found
    tried = try_context(found.plans[0], pricing, pinned, refusal)
    cp, rejected = tried.best.candidate.cp, list(found.rejected)
    if tried.rejected is not None or cp > 1:
        rejected = [own for own in rejected if not own.what.startswith("cp≥")]
    rejected += [] if tried.rejected is None else [tried.rejected]
    found = replace(
        found,
        rejected=tuple(rejected),
        num_priced=found.num_priced + tried.num_priced,
        num_candidates=found.num_candidates + tried.num_priced,
    )
    if cp == 1:
        return found
    other = search_job(replace(job, cps=(cp,)), pricing, pinned, top, most_priced, refusal)
    plans = [*found.plans, *other.plans]
    plans += [] if any(own.candidate == tried.best.candidate for own in plans) else [tried.best]
    plans.sort(key=lambda own: own.step_s)
    rest = f"its other plans are slower, or do not fit; --cp {cp} lists them"
    rejected.append(Rejected(f"cp={cp}", rest, other.num_candidates - len(other.plans)))
    return replace(
        found,
        plans=tuple(plans[:top]),
        behind=(*plans[top:], *found.behind, *other.behind),
        rejected=tuple(rejected),
        num_candidates=found.num_candidates + other.num_candidates,
        num_priced=found.num_priced + other.num_priced,
        is_proved=False,
    )


def context_degrees(job: Job) -> tuple[int, ...]:
    """Context parallel degrees of a search: 2, 4, 8, … that divide the number of devices.

    Args:
        job: the devices.
    """
    found = []
    degree = 2
    while degree <= MOST_CP and job.num_devices % degree == 0:
        found.append(degree)
        degree *= 2
    return tuple(found)


def _undivided(workload: Workload, job: Job, pinned: Pinned) -> Iterator[str]:
    """What the degrees of tensor parallelism that are searched leave whole on every rank."""
    base = pinned.microbatch or 1
    degrees = dict[tuple[str, str], list[int]]()
    for tp in searched_tp(job, pinned):
        ep = _expert_degree(pinned, tp)
        if tp > 1 and job.problem(tp, 1, ep) is None:
            graph, rewrite = workload.graph(base), workload.tensor_rewrite(Form(base, tp, ep=ep))
            weights = undivided_weights(graph, rewrite)
            if weights is not None:
                degrees.setdefault((weights, dividing_degrees(graph, rewrite)), []).append(tp)
    for (weights, advice), own in degrees.items():
        yield undivided_sentence(own, weights, advice)


def job_of(
    workload: Workload, cluster: Cluster, pinned: Pinned, cps: tuple[int, ...] = (1,)
) -> Job:
    """Degrees, batch and model facts that the search space of a job depends on.

    Args:
        workload: the job.
        cluster: the devices.
        pinned: choices that are made already.
        cps: context parallel degrees that are searched.
    """
    base = pinned.microbatch or 1
    return Job(
        num_devices=cluster.num_devices,
        devices_per_node=max(own.devices_per_node for own in cluster.nodes),
        global_batch=workload.global_batch,
        num_segments=len(workload.graph(base).segments),
        problem=_problem(workload, base),
        cps=cps,
        experts=num_experts(workload.graph(base)),
        common=workload.common,
        low_sums=workload.low_sums,
        drops_layers=workload.drops_layers(base),
        few_segments=few_segments(workload.graph(base)),
    )


def _with_copies(refusal: Refusal | None, graph: ModelGraph, pinned: Pinned) -> Refusal | None:
    """The refusal, also of schedules whose copies of a stage would write buffers differently."""
    kinds = classify_written_buffers(graph, num_pipes=2)
    written = [name for name, kind in kinds.items() if kind in DIFFERS]
    if not written or pinned.schedule is not None:
        return refusal

    def refuses(candidate: Candidate) -> str | None:
        why = None if refusal is None else refusal(candidate)
        with suppress(ScheduleError):  # which the price says again
            if why is None and candidate.traits.num_copies > 1:
                why = (
                    f"the forward writes the buffer {written[0]}, and each copy of a stage would "
                    "write its own; pin the schedule to have it"
                )
        return why

    return refuses


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
    if not space.candidates and not refused:
        reason = space.refusal
    found.rejections.extend(refused)
    return Ranking(
        plans=tuple(found.plans),
        rejected=tuple(merge(found.rejections, space.rejected.values())),
        behind=tuple(found.behind),
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


def _expert_degree(pinned: Pinned, tp: int) -> int:
    return tp if pinned.ep == tp else 1


def _problem(workload: Workload, microbatch: int) -> Callable[[int, int, int], str | None]:
    @cache
    def problem(tp: int, cp: int, ep: int) -> str | None:
        try:
            workload.rewrite(Form(microbatch, tp, cp=cp, ep=ep))
        except MerakError as error:
            return str(error).rstrip(".")
        return None

    return problem
