"""Choices of a plan, or of a microbatch alone, on rank 0 for all ranks of a job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from merak.core.announce import announce, announced
from merak.core.errors import MerakError, PlanError
from merak.core.mesh import Mesh
from merak.core.rank0 import decide_on_rank0
from merak.core.units import counted, size
from merak.plan.cluster.cluster import Cluster
from merak.plan.gradient_compression import AUTO
from merak.plan.price.candidate import Candidate
from merak.plan.price.price import Price
from merak.plan.price.step import price
from merak.plan.price.workload import Workload
from merak.plan.search.explain import describe
from merak.plan.search.pinned import Pinned
from merak.plan.search.plan_file import candidate_from
from merak.plan.search.prune import memory_rejection
from merak.plan.search.ranking import Refusal
from merak.plan.search.search import search
from merak.plan.search.smallest import fits_nowhere

_MOST_MICROBATCH = 64
"""Largest microbatch that is looked at where the rest of the layout is given."""


@dataclass(frozen=True, slots=True)
class Job:
    """A job whose plan is to be chosen.

    Args:
        workload: the model, its batches and its optimizer.
        cluster: its devices; None on other ranks than rank 0.
        refusal: why the job cannot have a layout, beyond what the model and the devices allow.
    """

    workload: Workload
    cluster: Cluster | None
    refusal: Refusal


def choose_plan(mesh: Mesh, job: Job, pinned: Pinned) -> Candidate:
    """Search the fastest plan of all ranks; all ranks call it together.

    The workload's `gradient_compression="auto"` becomes what the search chooses, on all ranks.

    Args:
        mesh: of the ranks, in whatever layout.
        job: what is planned.
        pinned: choices that are made already.

    Raises:
        PlanError: no plan fits; the smallest cluster that would do is named.
        TraceError: the model cannot be traced.
    """

    def chosen() -> Price:
        assert job.cluster is not None
        ranking = search(job.workload, job.cluster, pinned, top=1, refusal=job.refusal)
        if not ranking.plans:
            own = job.workload
            what = f"{type(own.model).__name__} with {counted(own.global_batch, 'sample')} a step"
            where = f"the {counted(mesh.world_size, 'device')} of this job"
            raise PlanError(fits_nowhere(what, where, own, job.cluster, pinned, ranking))
        announce(
            "plan: %d layouts compared, %d of them priced; `merak plan` prints them and says why",
            ranking.num_candidates,
            ranking.num_priced,
        )
        if others := ranking.of_other_kinds():
            announce("plan: the best of other kinds take longer: %s", others)
        return ranking.plans[0]

    common = job.workload.common
    with announced("choosing the plan"):
        plan = _on_rank0(mesh, "the plan", job, chosen)
    if common.gradient_compression == AUTO:
        name = "the compression of gradients"
        kind = decide_on_rank0(mesh, name, lambda: job.workload.common.gradient_compression)
        announce("%s: %s, by the price", name.removeprefix("the "), kind)
        job.workload.common = replace(common, gradient_compression=kind)
    return plan


def choose_microbatch(mesh: Mesh, job: Job, layout: Candidate) -> Candidate:
    """Choose the fastest microbatch that fits; all ranks call it together.

    Args:
        mesh: of the ranks.
        job: what is planned.
        layout: with one sample in every microbatch.

    Returns:
        The layout with the microbatch, and as many of them as the same step has.

    Raises:
        PlanError: no microbatch fits.
        TraceError: the model cannot be traced.
    """

    def chosen() -> Price:
        assert job.cluster is not None
        return fastest_microbatch(layout, partial(price, job.workload, job.cluster), job.refusal)

    with announced("choosing the microbatch"):
        return _on_rank0(mesh, "the microbatch", job, chosen)


def fastest_microbatch(
    layout: Candidate, price_of: Callable[[Candidate], Price], refusal: Refusal
) -> Price:
    """The price of the fastest microbatch of 1, 2, 4, 8, … samples that fits.

    Args:
        layout: with one sample in every microbatch.
        price_of: prices a layout.
        refusal: as of `Job`.

    Raises:
        MerakError: none fits, or the model or the schedule allows none.
    """
    found: list[Price] = []
    problem: str | None = None
    samples, microbatch = layout.num_microbatches, 1
    while samples % microbatch == 0 and microbatch <= _MOST_MICROBATCH:
        own = replace(layout, microbatch=microbatch, num_microbatches=samples // microbatch)
        microbatch *= 2
        refused = refusal(own)
        try:
            priced = price_of(own) if refused is None else None
        except MerakError as error:
            refused = str(error).rstrip(".")
            priced = None
        if priced is None:
            problem = problem or refused
            continue
        found.append(priced)
        if not priced.fits:
            break  # larger ones take more
    fitting = [own for own in found if own.fits]
    if fitting:
        return min(fitting, key=lambda own: own.step_s)
    if found:
        problem = _too_large(found[0])
    raise PlanError(f"per_device_train_batch_size='auto' finds no microbatch that fits: {problem}.")


def _too_large(price: Price) -> str:
    rejection = memory_rejection(price)
    assert rejection is not None
    return (
        f"one of {price.candidate.microbatch} takes {rejection.why}; "
        "use recompute='full', a higher zero, more ranks, or plan='auto'"
    )


def _on_rank0(mesh: Mesh, what: str, job: Job, chosen: Callable[[], Price]) -> Candidate:
    """Decide on rank 0, and announce the plan there."""

    def decide() -> dict[str, object]:
        best = chosen()
        announce(
            "%s: %s; %d samples a step, which takes %.4g s (± %.0f %%), with %s of memory",
            what.removeprefix("the "),
            describe(best.candidate),
            job.workload.global_batch,
            best.step_s,
            100 * best.uncertainty,
            size(max(best.peak_memory_bytes)),
        )
        form = job.workload.form(best.candidate)
        if form.dp is not None and form.dp > 1:
            announce(
                "the model or its loss takes values from other replicas: it sees %d samples at a "
                "time, one microbatch of each; give dp and the microbatch to choose that number",
                form.dp * form.microbatch,
            )
        return best.candidate.values()

    return candidate_from(decide_on_rank0(mesh, what, decide))
