"""`merak rehearse`: one rank of a planned job, run on this machine without the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from typing import TYPE_CHECKING, Any

from merak.cli.model import (
    filled,
    model_source,
    model_workload,
    precision_of,
    recipe_job,
    request_optimizer,
    types_of,
)
from merak.cli.options import LayoutRequest, TypedRequest, check_counts, job_options, option, takes
from merak.cli.output import show, stdout_to_stderr
from merak.cli.rehearse_report import RehearsalReport, page, report_on
from merak.core.errors import CommandError
from merak.core.health.stderr import write_line
from merak.launch.devices import device_of
from merak.plan.options import LAYOUT, PRICED, ParallelOptions

if TYPE_CHECKING:
    from merak.plan.price.candidate import Candidate


@dataclass(frozen=True, kw_only=True)
class RehearseRequest(LayoutRequest, TypedRequest):
    """Request to run one rank of a job."""

    cluster: str = option(
        MISSING, "--cluster", "C", "What the job is planned for: such as h100:8x128, or a file."
    )
    rank: int = option(MISSING, "--rank", "R", "The rank to run, 0 to dp × cp × tp × pp − 1.")
    microbatch: int = option(1, "--microbatch", "B", "Samples of a microbatch.")
    global_batch: int | None = option(
        None,
        "--global-batch",
        "N",
        "Samples of a step of the job; dp × microbatch × 2 pp if unset.",
    )
    layout: Mapping[str, Any] = job_options(*LAYOUT)
    optimizer: str = option("AdamW", "--optimizer", "CLASS", "Of torch.optim.")
    common: Mapping[str, Any] = job_options(*PRICED)
    steps: int = option(3, "--steps", "N", "Steps that are timed.")


@takes(RehearseRequest)
def rehearse(request: RehearseRequest) -> None:
    """Run one rank of a large job alone: its memory and computation, before the others exist."""
    with stdout_to_stderr():
        report = rehearsal_report(request)
    show(report, page, request.as_json)


def rehearsal_report(request: RehearseRequest) -> RehearsalReport:
    """Run one rank of a job, and report what it took.

    Args:
        request: the model, the cluster and the plan.

    Raises:
        CommandError: there is no such model, optimizer or option.
        MerakError: the plan does not fit the model or the cluster.
    """
    # Heavy imports wait until a command is known to be well formed.
    from merak.plan.cluster.fit import usable_by_pp_rank
    from merak.plan.cluster.parse import parse_cluster
    from merak.rehearse.rehearsal import refuse_rank
    from merak.rehearse.rehearsal import rehearse as run
    from merak.zoo.workload import example_batch

    job, here = recipe_job(request), device_of(request.device)
    draft = None if job is None else job.draft(here)
    if draft is not None:
        draft.refuse_unpriced("merak rehearse")
        request = filled(request, draft.laid_out())
    candidate = _candidate(request)
    cluster = parse_cluster(request.cluster)
    mesh = candidate.mesh(request.rank, here)
    refuse_rank(mesh, request.steps)
    usable_by_pp_rank(cluster, mesh)  # refuses a cluster that is too small
    types_of(request.dtype, request.autocast)  # refuses words before the model is built
    request, source = model_source(request, job)
    workload = model_workload(
        request,
        source,
        global_batch=candidate.dp * candidate.microbatch * candidate.num_microbatches,
        device=here,
        optimizer=request_optimizer(request, draft),
        common=ParallelOptions(**request.common),
        draft=draft,
    )
    write_line(f"merak: {precision_of(workload, request, job)}.")
    samples = candidate.microbatch * candidate.num_microbatches
    batch = example_batch(source, request.sequence, samples)
    found = run(workload, cluster, candidate, request.rank, batch, device=here, steps=request.steps)
    return report_on(source.name, request.cluster, found)


def _candidate(request: RehearseRequest) -> Candidate:
    from merak.core.elastic import Degrees, check_expert_degree
    from merak.plan.price.candidate import Candidate, option_values

    check_counts(request, "dp", "tp", "pp", "cp", "microbatch")
    if request.layout["sub_pipelining"] == "auto" and "sub_pipelining" in request.given:
        raise CommandError("--sub-pipelining auto waits for all ranks; use on or off.")
    degrees = Degrees(request.dp, request.tp, request.pp, request.cp)
    return Candidate(
        **degrees._asdict(),
        ep=check_expert_degree(request.ep, degrees),
        microbatch=request.microbatch,
        num_microbatches=_num_microbatches(request),
        **option_values(request.layout),
    )


def _num_microbatches(request: RehearseRequest) -> int:
    """Microbatches of a step on one replica."""
    if request.global_batch is None:
        return 2 * request.pp
    each = request.dp * request.microbatch
    if request.global_batch < each or request.global_batch % each:
        raise CommandError(
            f"--global-batch {request.global_batch} is not a multiple of dp × microbatch = {each}; "
            f"use {max(1, request.global_batch // each) * each}."
        )
    return request.global_batch // each
