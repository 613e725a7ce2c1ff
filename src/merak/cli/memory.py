"""`merak memory`: what every stage of a job will take, before anything runs."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from merak.cli import options
from merak.cli.memory_report import MemoryReport, page, report_on
from merak.cli.output import show, stdout_to_stderr
from merak.launch.errors import CommandError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from merak.core.mesh import Mesh
    from merak.plan.cost.optimizer_memory import OptimizerFactory

_NO_LIMIT = sys.maxsize
"""A budget that everything fits: the command shows what would not fit here as well."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the memory is asked of.

    Args:
        model: as `--model`.
        config: as `--config`.
        batch: samples of a microbatch.
        sequence: tokens; None for the model's longest, up to 512.
        degrees: dp, tp and pp.
        schedule: name of the pipeline schedule.
        microbatches: of a step.
        recompute: as `MerakArguments.recompute`.
        offload: as `MerakArguments.offload_activations`.
        host_bytes_per_s: as of `MerakArguments`.
        budget: bytes that a rank may hold; None for no limit.
        optimizer: class in `torch.optim`.
        device: "cpu" or "cuda"; None for what this machine has.
        zero: what replicas share, as `MerakArguments.zero`.
        master_weights: whether parameters of low precision have float32 masters.
        dtype: of the parameters.
        autocast: what the model runs under `torch.autocast` with; None for not.
        sequence_parallel: whether tensor parallel ranks hold shares of the sequence.
        trust_remote_code: whether code in the model's folder may run.
    """

    model: str
    config: str | None = None
    batch: int = 1
    sequence: int | None = None
    degrees: tuple[int, int, int] = (1, 1, 1)
    schedule: str = "1f1b"
    microbatches: int = 1
    recompute: str | None = None
    offload: str | None = None
    host_bytes_per_s: float | None = None
    budget: int | None = None
    optimizer: str = "AdamW"
    device: str | None = None
    zero: int = 0
    master_weights: bool = False
    dtype: str = "float32"
    autocast: str | None = None
    sequence_parallel: bool = False
    trust_remote_code: bool = False


def memory(  # one argument for each option
    model: options.Model,
    config: options.Config = None,
    dp: Annotated[int, typer.Option("--dp", metavar="D", help="Data parallel degree.")] = 1,
    tp: Annotated[int, typer.Option("--tp", metavar="T", help="Tensor parallel degree.")] = 1,
    pp: Annotated[int, typer.Option("--pp", metavar="P", help="Pipeline parallel degree.")] = 1,
    schedule: Annotated[
        str, typer.Option("--schedule", metavar="NAME", help="Pipeline schedule.")
    ] = "1f1b",
    microbatches: Annotated[
        int, typer.Option("--microbatches", metavar="M", help="Microbatches of a step.")
    ] = 1,
    batch: options.Batch = 1,
    seq: options.Sequence = None,
    recompute: Annotated[
        str | None,
        typer.Option(
            "--recompute",
            metavar="WHAT",
            help="off, full, selective, auto, a share of the segments (0 to 1), or such as 3,4,7.",
        ),
    ] = None,
    offload: Annotated[
        str | None,
        typer.Option(
            "--offload",
            metavar="WHAT",
            help="Kept activations in host memory: off, full, auto, a share, or such as 3,4,7.",
        ),
    ] = None,
    host_bytes_per_s: Annotated[
        float | None,
        typer.Option(
            "--host-bytes-per-s",
            metavar="RATE",
            help="Of copies to host memory, each way at once; measured here by default.",
        ),
    ] = None,
    budget: Annotated[
        int | None, typer.Option("--budget", metavar="BYTES", help="What a rank may hold.")
    ] = None,
    optimizer: Annotated[
        str, typer.Option("--optimizer", metavar="CLASS", help="Of torch.optim.")
    ] = "AdamW",
    zero: Annotated[
        int,
        typer.Option(
            "--zero",
            metavar="0|1|2|3",
            help="What replicas share: 1 the optimizer, 2 also the gradients, 3 the parameters.",
        ),
    ] = 0,
    master_weights: Annotated[
        bool,
        typer.Option("--master-weights", help="float32 masters of parameters of low precision."),
    ] = False,
    dtype: Annotated[
        str,
        typer.Option("--dtype", metavar="TYPE", help="Of the parameters, such as bfloat16."),
    ] = "float32",
    autocast: Annotated[
        str | None,
        typer.Option(
            "--autocast", metavar="TYPE", help="bfloat16 or float16: what bf16 and fp16 train with."
        ),
    ] = None,
    sequence_parallel: options.SequenceParallel = False,
    trust_remote_code: options.TrustRemoteCode = False,
    device: options.Device = None,
    as_json: options.Json = False,
) -> None:
    """Show what every stage of a job will take, without running or creating anything."""
    request = Request(
        model, config, batch, seq, (dp, tp, pp), schedule, microbatches, recompute, offload,
        host_bytes_per_s, budget, optimizer, device, zero, master_weights, dtype, autocast,
        sequence_parallel, trust_remote_code,
    )  # fmt: skip
    with stdout_to_stderr():
        report = memory_report(request)
    show(report, page, as_json)


def memory_report(request: Request) -> MemoryReport:
    """The memory of a job, from the shapes of its model alone.

    Args:
        request: the model and how it is laid out.

    Raises:
        CommandError: there is no such model or optimizer, or the sizes do not fit it.
        MerakError: the layout does not fit the model, or the job not its budget.
    """
    # Heavy imports wait until a command is known to be well formed.
    from merak.arguments import default_trace_cache
    from merak.engine.build import forecast_of
    from merak.graph.segment.build import GraphSource
    from merak.graph.weights.empty_weights import empty_weights
    from merak.launch.devices import planned_device
    from merak.plan.engine_options import EngineOptions
    from merak.zoo.batches.batch import example_arguments, example_columns
    from merak.zoo.model_source import check_inner_fields, parse_overrides, resolve_model

    device, sheet = planned_device(request.device)
    mesh = _mesh(request, device)
    dtype, autocast = _types(request)
    if request.microbatches < 1:
        raise CommandError(f"--microbatches {request.microbatches} is too few; use 1 or more.")
    changes = parse_overrides(request.config)
    source = resolve_model(request.model, changes, trust_remote_code=request.trust_remote_code)
    check_inner_fields(source.config, changes)
    columns = example_columns(
        source.model_class, source.config, batch=request.batch, sequence=request.sequence
    )
    with empty_weights():
        built: nn.Module = source.build()
        module = built.to(dtype)
    folder = default_trace_cache()
    if (
        sheet is not None
        and request.budget is None
        and "auto" in (request.recompute, request.offload)
    ):
        raise CommandError(
            f"'auto' needs to know the memory of --device {request.device}, which is not here; "
            "give it with --budget BYTES."
        )
    limit = None if "auto" in (request.recompute, request.offload) else _NO_LIMIT
    forecast = forecast_of(
        GraphSource(
            module,
            fixed=example_arguments(source.model_class),
            device=mesh.device,
            cache_dir=Path(folder) if folder else None,
            autocast=autocast,
        ),
        tuple((name, column.meta) for name, column in columns.items()),
        mesh,
        EngineOptions(
            schedule=request.schedule,
            num_microbatches=request.microbatches,
            recompute=request.recompute,
            offload_activations=request.offload,
            host_bytes_per_s=request.host_bytes_per_s,
            memory_budget=limit if request.budget is None else request.budget,
            optimizer=_optimizer(request.optimizer),
            zero=request.zero,
            master_weights=request.master_weights,
            sequence_parallel=request.sequence_parallel,
            device_profile=sheet,
        ),
    )
    return report_on(source.name, forecast, Path(folder) if folder else None)


def _mesh(request: Request, device: torch.device) -> Mesh:
    from merak.core.mesh import Mesh

    for axis, degree in zip(("dp", "tp", "pp"), request.degrees, strict=True):
        if degree < 1:
            raise CommandError(f"--{axis} {degree} is not a degree; use 1 or more.")
    if request.budget is not None and request.budget < 1:
        raise CommandError(f"--budget {request.budget} is not a size; use bytes above 0.")
    speed = request.host_bytes_per_s
    if speed is not None and not 0 < speed < math.inf:
        raise CommandError(f"--host-bytes-per-s {speed} is no rate; use a number above 0.")
    return Mesh(*request.degrees, 0, device, None)


def _types(request: Request) -> tuple[torch.dtype, torch.dtype | None]:
    """Of the parameters, and of autocast."""
    import torch

    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if request.dtype not in known:
        raise CommandError(
            f"--dtype {request.dtype} is no type of parameters; use one of {', '.join(known)}."
        )
    if request.autocast is None:
        return known[request.dtype], None
    if request.autocast not in ("bfloat16", "float16"):
        raise CommandError(f"--autocast {request.autocast} is none; use bfloat16 or float16.")
    return known[request.dtype], known[request.autocast]


def _optimizer(name: str) -> OptimizerFactory:
    import torch

    cls = getattr(torch.optim, name, None)
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise CommandError(f"--optimizer {name} is no class of torch.optim; use such as AdamW.")
    return lambda parameters: cls(parameters, lr=1e-3)  # type: ignore[call-arg]
