"""`merak memory`: the memory of every stage of a job, before anything runs."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from merak.cli.memory_report import MemoryReport, page, report_on
from merak.cli.model import (
    filled,
    model_source,
    model_workload,
    precision_of,
    recipe_job,
    request_optimizer,
    types_of,
)
from merak.cli.options import JobRequest, TypedRequest, check_counts, job_options, option, takes
from merak.cli.output import show, stdout_to_stderr
from merak.core.errors import CommandError
from merak.core.health.stderr import write_line
from merak.launch.devices import planned_device, planning_device
from merak.plan.cost.data_sheets import SHEETS
from merak.plan.options import LAYOUT, PRICED

if TYPE_CHECKING:
    import torch

    from merak.cli.recipe.planned_job import JobDraft
    from merak.core.mesh import Mesh
    from merak.plan.cost.device import DeviceProfile
    from merak.plan.engine_options import EngineOptions

_NO_LIMIT = sys.maxsize
"""A budget that everything fits: the command shows what would not fit here as well."""


@dataclass(frozen=True, kw_only=True)
class MemoryRequest(JobRequest, TypedRequest):
    """Request for the memory of a job."""

    options: Mapping[str, Any] = job_options(*LAYOUT, *PRICED, "host_bytes_per_s", "memory_budget")
    optimizer: str = option("AdamW", "--optimizer", "CLASS", "Of torch.optim.")
    device: str | None = option(
        None,
        "--device",
        "cpu|cuda|GPU",
        "What ranks compute on; what the machine has. A GPU by its data sheet need not be here: "
        f"{', '.join(SHEETS)}.",
    )
    cluster: str | None = option(
        None,
        "--cluster",
        "DEVICE:PER_NODExNODES|FILE",
        "Devices that need not be here, such as h100:8x4, or a YAML file of them.",
    )


@takes(MemoryRequest)
def memory(request: MemoryRequest) -> None:
    """Show the memory of every stage of a job, without running or creating anything."""
    with stdout_to_stderr():
        report = memory_report(request)
    show(report, page, request.as_json)


def memory_report(request: MemoryRequest) -> MemoryReport:
    """Forecast the memory of a job from the shapes of its model alone.

    Args:
        request: the model and how it is laid out.

    Raises:
        CommandError: there is no such model or optimizer, or the sizes do not fit it.
        MerakError: the layout does not fit the model, or the job not its budget.
    """
    # Heavy imports wait until a command is known to be well formed.
    import torch

    from merak.engine import forecast_of
    from merak.plan.cluster.parse import parse_cluster

    job = recipe_job(request)
    draft = None if job is None else job.draft(torch.device("cpu"), _profiles(request))
    if draft is not None:
        request = filled(request, draft.laid_out())
    device, sheet, usable = _devices(request)
    mesh = _mesh(request, device)
    types_of(request.dtype, request.autocast)  # refuses words before the model is built
    engine_options = _engine_options(request, sheet, draft)
    request, source = model_source(request, job)
    workload = model_workload(
        request, source, global_batch=request.batch, device=mesh.device, draft=draft
    )
    write_line(f"merak: {precision_of(workload, request, job)}.")
    columns = workload.columns(request.batch)
    forecast = forecast_of(workload.source, columns, mesh, engine_options)
    cluster = None if request.cluster is None else parse_cluster(request.cluster)
    return report_on(source.name, forecast, workload.source.cache_dir, usable, cluster)


def _profiles(request: MemoryRequest) -> list[DeviceProfile]:
    """Profiles of the devices that need not be here; none where these are meant."""
    from merak.plan.cluster.parse import parse_cluster

    if request.cluster is not None:
        return [own.device for own in parse_cluster(request.cluster).nodes]
    _, sheet = planned_device(request.device)
    return [] if sheet is None else [sheet]


def _devices(
    request: MemoryRequest,
) -> tuple[torch.device, DeviceProfile | None, tuple[float, ...] | None]:
    """Where to trace, the profile that times rest on, and bytes that each pp rank may fill."""
    from merak.plan.cluster.fit import usable_by_pp_rank, usable_on
    from merak.plan.cluster.parse import parse_cluster

    if request.cluster is None:
        device, sheet = planned_device(request.device)
        usable = None if sheet is None else (usable_on(sheet, _mesh(request, device)),) * request.pp
        return device, sheet, usable
    if request.device is not None:
        raise CommandError(
            f"--device {request.device} and --cluster {request.cluster} both name devices; "
            "give one of them."
        )
    cluster = parse_cluster(request.cluster)
    smallest = min(cluster.devices, key=lambda profile: profile.memory_bytes or math.inf)
    device = planning_device(smallest)
    return device, smallest, usable_by_pp_rank(cluster, _mesh(request, device))


def _engine_options(
    request: MemoryRequest, sheet: DeviceProfile | None, draft: JobDraft | None
) -> EngineOptions:
    """The engine's options; a job that fits no device is shown all the same."""
    from merak.plan.engine_options import EngineOptions

    check_counts(request, "microbatches")
    own = request.options
    budget = own["memory_budget"]
    if "auto" not in (own["recompute"], own["offload_activations"]):
        budget = _NO_LIMIT if budget is None else budget
    chosen = {} if draft is None else draft.options()
    return EngineOptions(
        **chosen | dict(own) | {"memory_budget": budget},
        num_microbatches=request.microbatches,
        optimizer=request_optimizer(request, draft),
        device_profile=sheet,
    )


def _mesh(request: MemoryRequest, device: torch.device) -> Mesh:
    from merak.core.elastic import Degrees, check_expert_degree
    from merak.core.mesh import Mesh

    check_counts(request, "dp", "tp", "pp", "cp")
    degrees = Degrees(request.dp, request.tp, request.pp, request.cp)
    ep = check_expert_degree(request.ep, degrees)
    return Mesh(request.dp, request.tp, request.pp, 0, device, None, cp=request.cp, ep=ep)
