"""The summary of a job before its first step: ranks, stages, memory, the pipeline's bubble."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from merak.core.errors import MerakError
from merak.core.mesh import Mesh, crosses_hosts, describe_hosts
from merak.core.tensor_meta import Signature
from merak.core.units import count, ranges, size
from merak.plan.activations.forecast import Forecast
from merak.plan.step_plans import StepPlans
from merak.schedule.costs import uniform
from merak.schedule.ir import Schedule
from merak.schedule.simulator.simulate import simulate

IDLE = 0.5
"""Bubble fraction from which a message recommends more microbatches."""

_ENOUGH = 4
"""Microbatches per pp rank with which common schedules idle a fifth of a step."""


def describe_mesh(mesh: Mesh) -> str:
    """A mesh in a line: how many ranks, where, and the degrees."""
    device = mesh.device.type
    if device == "cuda":
        device = torch.cuda.get_device_name(mesh.device)
    ranks = f"{mesh.world_size} rank{'s' * (mesh.world_size > 1)}"
    degrees = f"({device}): dp {mesh.dp} × tp {mesh.tp} × pp {mesh.pp}"
    if mesh.cp > 1:
        degrees += f" × cp {mesh.cp}"
    if mesh.ep > 1:
        degrees += f", ep {mesh.ep} over {'replicas' if mesh.spreads_experts else 'tp'}"
    if not mesh.hosts:
        return f"{ranks} on 1 host {degrees}"
    across = [axis for axis in ("tp", "cp", "dp", "pp") if crosses_hosts(mesh, axis)]
    where = f"{len(set(mesh.hosts))} hosts ({describe_hosts(mesh.hosts)})"
    return f"{ranks} on {where} {degrees}, with {' and '.join(across)} across hosts"


def summary(forecast: Forecast, sample: Signature) -> str:
    """A job's layout in a few lines, for people.

    Args:
        forecast: of the job, with its stages.
        sample: the columns of a microbatch.
    """
    graph, schedule = forecast.layout.graph, forecast.layout.schedule
    parameters = sum(math.prod(meta.shape) for meta in graph.parameters.values())
    lines = [
        f"{type(forecast.model).__name__}: {count(parameters)} parameters in "
        f"{len(graph.segments)} segments",
        f"  {schedule.name}: {schedule.num_microbatches} microbatch"
        f"{'es' * (schedule.num_microbatches > 1)}{_shape(sample)} for each step and replica"
        + (f", bubble {bubble(schedule):.0%} of all time" if schedule.num_ranks > 1 else ""),
        *_table([_HEAD, *_rows(forecast)]),
    ]
    return "\n".join(lines)


_HEAD = ("ranks", "stages", "segments", "", "parameters", "forecast memory of a rank")


def _rows(forecast: Forecast) -> list[tuple[str, ...]]:
    """A row for each pipeline rank."""
    layout, mesh = forecast.layout, forecast.mesh
    memory = _memory(forecast)
    rows: list[tuple[str, ...]] = []
    for rank in range(mesh.pp):
        stages = layout.schedule.stages_of(rank)
        segments = [layout.graph.segments[i] for s in stages for i in layout.partition.stages[s]]
        names = dict.fromkeys(n for segment in segments for n in segment.parameters)
        first = rank * mesh.replicas * mesh.tp
        named = [name for name in (segments[0].name, segments[-1].name) if name]
        rows.append(
            (
                ranges(range(first, first + mesh.replicas * mesh.tp)),
                ranges(list(stages)),
                ranges(sorted(segment.index for segment in segments)),
                " … ".join(dict.fromkeys(named)),
                count(sum(math.prod(layout.graph.parameters[name].shape) for name in names)),
                memory[rank],
            )
        )
    return rows


def _memory(forecast: Forecast) -> Sequence[str]:
    try:
        found = forecast.ranks(forecast.layout.schedule)
    except Exception:
        # Code of the model's own may read values, which fake tensors do not have.
        return ["unknown"] * forecast.mesh.pp
    return [size(rank.peak.total_bytes) for rank in found]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows in aligned columns, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    last = len(widths) - 2
    return [
        "  "
        + "  ".join(
            cell.rjust(width) if place >= last else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _shape(sample: Signature) -> str:
    shapes = [meta.shape for _, meta in sample if meta.shape]
    return " of " + " × ".join(map(str, shapes[0])) if shapes else ""


def bubble(schedule: Schedule) -> float:
    """The bubble fraction of a schedule with equal stages: idle time ÷ total time."""
    return simulate(schedule, uniform(schedule.num_stages)).bubble_fraction


def idle_pipeline(plans: StepPlans, option: str) -> str | None:
    """The message about steps with too few microbatches for the pipeline.

    Args:
        plans: of the job.
        option: what the user sets the number of microbatches with.

    Returns:
        A sentence; None where the ranks are busy for more than half of the time.
    """
    schedule = plans.base.schedule
    if schedule.num_ranks == 1 or bubble(schedule) < IDLE:
        return None
    ranks, given = schedule.num_ranks, schedule.num_microbatches
    enough = _ENOUGH * ranks
    try:
        better = f"; {option}={enough} would leave {bubble(plans.of_as_many(enough)):.0%}"
    except MerakError:
        better = f"; use more, such as {option}={enough}"
    microbatches = f"microbatch{'es' * (given > 1)}"
    return (
        f"{option}={given} gives the pipeline of {ranks} ranks {given} {microbatches} a step, "
        f"which leaves them idle {bubble(schedule):.0%} of the time{better}."
    )
