"""The schedule of a model on devices that need not be here, for `merak schedule --model`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from merak.cli.devices import cluster, planned_cluster, sheet_device
from merak.cli.model import filled, model_source, model_workload, precision_of, recipe_job
from merak.cli.options import TypedRequest, check_counts, option
from merak.core.errors import CommandError
from merak.core.health.stderr import write_line

if TYPE_CHECKING:
    from merak.schedule.simulator.simulate import Simulation


@dataclass(frozen=True, kw_only=True)
class StagesRequest(TypedRequest):
    """Request for the stages of a model on devices that need not be here."""

    model: str | None = option(  # type: ignore[assignment]  # here it may be left out
        None,
        "--model",
        "M",
        "Take the stages of this model instead: transformers class, config or recipe.",
    )
    config: str | None = option(
        None, "--config", "JSON", "Fields of the model's config to change, as an object."
    )
    batch: int = option(1, "--batch", "B", "Samples of a microbatch of the model.")
    tp: int = option(1, "--tp", "T", "Tensor parallel degree of the model.")
    cp: int = option(1, "--cp", "C", "Context parallel degree: ranks that share tokens.")
    ep: int = option(1, "--ep", "E", "Expert parallel degree: that of tp, or of replicas.")
    device: str | None = sheet_device("What the model's stages run on.")
    cluster: str | None = cluster()


def simulate_model(
    request: StagesRequest,
    name: str,
    stages: int,
    microbatches: int,
    options: Mapping[str, Any],
) -> tuple[Simulation, tuple[int, ...]]:
    """Simulate a schedule with the stages of a model, balanced for its devices.

    Args:
        request: the model and the devices.
        name: of the schedule.
        stages: pipeline degree.
        microbatches: of an iteration.
        options: of the schedule.

    Returns:
        The simulation, in seconds, and the number of segments of every stage.

    Raises:
        CommandError: no devices, or counts below 1.
        MerakError: the model does not fit the schedule or the devices.
    """
    _check(request)
    # Heavy imports wait until a command is known to be well formed.
    import torch

    from merak.core.elastic import Degrees, check_expert_degree
    from merak.plan.price.candidate import Candidate
    from merak.plan.price.step import price, simulated_pipeline

    devices = planned_cluster(request.device, request.cluster, stages * request.cp * request.tp)
    assert devices is not None and request.model is not None
    job = recipe_job(request)
    if job is not None:
        nodes = devices.nodes
        draft = job.draft(torch.device("cpu"), [own.device for own in nodes])
        request = filled(request, {"autocast": draft.laid_out()["autocast"]})
    request, source = model_source(request, job)
    workload = model_workload(request, source, global_batch=request.batch * microbatches)
    write_line(f"merak: {precision_of(workload, request, job)}.")
    candidate = Candidate(
        dp=request.ep if request.tp == 1 else 1,
        tp=request.tp,
        pp=stages,
        cp=request.cp,
        ep=check_expert_degree(request.ep, Degrees(request.ep, request.tp, 1)),
        microbatch=request.batch,
        num_microbatches=microbatches,
        schedule=name,
        schedule_options=options,
        recompute=None,
    )
    chosen = price(workload, devices, candidate).candidate
    return simulated_pipeline(workload, devices, chosen), chosen.partition or ()


def _check(request: StagesRequest) -> None:
    if request.device is None and request.cluster is None:
        raise CommandError(
            f"--model {request.model} takes time on devices; name them with --device or --cluster."
        )
    check_counts(request, "tp", "cp", "batch")
