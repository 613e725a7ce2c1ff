"""The schedule of a model on devices that need not be here, for `merak schedule --model`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merak.cli.devices import planned_cluster
from merak.launch.errors import CommandError

if TYPE_CHECKING:
    from merak.cli.schedule import ScheduleRequest
    from merak.schedule.simulator.simulate import Simulation

_TIMES = ("forward", "backward", "recompute", "transfer", "all_reduce", "layers", "in_halves")
"""Options that say what stages take, which a model says by itself."""


def simulate_model(
    request: ScheduleRequest, stages: int, microbatches: int, options: Mapping[str, Any]
) -> tuple[Simulation, tuple[int, ...]]:
    """Simulate a schedule with the stages of a model, balanced for its devices.

    Args:
        request: the model, the devices and the schedule.
        stages: pipeline degree.
        microbatches: of an iteration.
        options: of the schedule.

    Returns:
        The simulation, in seconds, and the number of segments of every stage.

    Raises:
        CommandError: no devices, or times that contradict the model's.
        MerakError: the model does not fit the schedule or the devices.
    """
    _check(request)
    # Heavy imports wait until a command is known to be well formed.
    from merak.arguments import default_trace_cache
    from merak.cli.memory import types_of
    from merak.plan.price.candidate import Candidate
    from merak.plan.price.step import price, simulated_pipeline
    from merak.zoo.model_source import check_inner_fields, parse_overrides, resolve_model
    from merak.zoo.workload import example_workload

    devices = planned_cluster(request.device, request.cluster, stages * request.tp)
    assert devices is not None and request.model is not None
    dtype, autocast = types_of(request.dtype, request.autocast)
    changes = parse_overrides(request.config)
    source = resolve_model(request.model, changes, trust_remote_code=request.trust_remote_code)
    check_inner_fields(source.config, changes)
    folder = default_trace_cache()
    workload = example_workload(
        source,
        global_batch=request.batch * microbatches,
        sequence=request.sequence,
        dtype=dtype,
        autocast=autocast,
        cache_dir=Path(folder) if folder else None,
    )
    candidate = Candidate(
        tp=request.tp,
        pp=stages,
        microbatch=request.batch,
        num_microbatches=microbatches,
        schedule=str(request.name),
        schedule_options=options,
        recompute=None,
    )
    chosen = price(workload, devices, candidate).candidate
    return simulated_pipeline(workload, devices, chosen), chosen.partition or ()


def _check(request: ScheduleRequest) -> None:
    if request.device is None and request.cluster is None:
        raise CommandError(
            f"--model {request.model} takes time on devices; name them with --device or --cluster."
        )
    defaults = {own.name: own.default for own in fields(request)}
    for name in _TIMES:
        if getattr(request, name) != defaults[name]:
            flag = "--" + name.replace("_", "-")
            raise CommandError(f"{flag} and --model both say what stages take; leave one out.")
    for flag, value in (("--tp", request.tp), ("--batch", request.batch)):
        if value < 1:
            raise CommandError(f"{flag} {value} is too few; use 1 or more.")
