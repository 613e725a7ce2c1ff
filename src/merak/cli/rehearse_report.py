"""Report of `merak rehearse`: what one rank took, beside the forecast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from merak.core import units
from merak.core.units import size

if TYPE_CHECKING:
    from merak.rehearse.rehearsal import Rehearsal


@dataclass(frozen=True, slots=True)
class ActionReport:
    """Actions of one kind and stage in a step.

    Args:
        action: kind of the action: "F", "R", "B", "I" or "W".
        stage: of the model.
        count: of them in a step.
        compute: measured seconds of one.
        communication: charged seconds of its collectives over tp.
        forecast: seconds of one by the plan, both together.
    """

    action: str
    stage: int
    count: int
    compute: float
    communication: float
    forecast: float


@dataclass(frozen=True, slots=True)
class ChargeReport:
    """Collectives or transfers of one kind in a step, charged by the cost model.

    Args:
        axis: along which the ranks lie.
        kind: of the calls.
        ranks: of a group.
        calls: number of them.
        bytes: of their tensors.
        seconds: of all of them, one after another.
    """

    axis: str
    kind: str
    ranks: int
    calls: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RehearsalReport:
    """Report of a rehearsal. Seconds and bytes are of one step.

    Args:
        model: the architecture's class name.
        cluster: as it was given.
        rank: of the job.
        pp_rank: its place in the pipeline.
        world_size: ranks of the job.
        device: that it ran on.
        partition: segments of every stage.
        seconds: measured computation of the rank's actions (`compute`) and optimizer, charged
            collectives and transfers by axis, the simulated step of the job (`step`).
        actions: of the rank.
        charges: of the rank.
        peak_memory_bytes: measured.
        forecast: of the same: `step_seconds` and `uncertainty` on the cluster,
            `peak_memory_bytes` and its `at` on the device that it ran on, `memory_uncertainty`,
            and `cluster_peak_memory_bytes` on the cluster's device.
        memory_ratio: measured ÷ forecast peak.
        warnings: sentences.
    """

    model: str
    cluster: str
    rank: int
    pp_rank: int
    world_size: int
    device: str
    partition: list[int]
    seconds: dict[str, float]
    actions: list[ActionReport]
    charges: list[ChargeReport]
    peak_memory_bytes: int
    forecast: dict[str, float | int | str]
    memory_ratio: float
    warnings: list[str]


def report_on(name: str, cluster: str, found: Rehearsal) -> RehearsalReport:
    """Report a rehearsal.

    Args:
        name: of the model.
        cluster: as it was given.
        found: what it found.
    """
    from merak.rehearse.rehearsal import device_name

    mesh, planned = found.mesh, found.planned
    charged = {axis: 0.0 for axis in ("tp", "dp", "pp", "job")}
    for charge in found.charges:
        charged[charge.axis] += charge.seconds
    seconds = {
        "compute": sum(own.count * own.measured_s for own in found.actions),
        "optimizer": found.optimizer_s,
        "tp_collectives": charged["tp"],
        "dp_collectives": charged["dp"],
        "transfers": charged["pp"],
        "other_collectives": charged["job"],
        "step": found.step_s,
    }
    return RehearsalReport(
        model=name,
        cluster=cluster,
        rank=mesh.rank,
        pp_rank=mesh.pp_rank,
        world_size=mesh.world_size,
        device=device_name(mesh.device),
        partition=list(found.candidate.partition or ()),
        seconds=seconds,
        actions=[
            ActionReport(
                own.kind, own.stage, own.count, own.measured_s, own.charged_s, own.forecast_s
            )
            for own in found.actions
        ],
        charges=[
            ChargeReport(own.axis, own.kind, own.ranks, own.calls, own.num_bytes, own.seconds)
            for own in found.charges
        ],
        peak_memory_bytes=found.peak_bytes,
        forecast={
            "step_seconds": planned.step_s,
            "uncertainty": planned.uncertainty,
            "peak_memory_bytes": found.memory.peak.total_bytes,
            "at": found.memory.peak.at,
            "memory_uncertainty": planned.memory_uncertainty,
            "cluster_peak_memory_bytes": planned.peak_memory_bytes[mesh.pp_rank],
        },
        memory_ratio=found.memory_ratio,
        warnings=list(found.warnings),
    )


def page(report: RehearsalReport) -> str:
    """Format a report for people."""
    seconds = units.seconds
    actions = [
        (a.action, a.stage, a.count, *map(seconds, (a.compute, a.communication, a.forecast)))
        for a in report.actions
    ]
    charges = [
        (f"{c.axis} {c.kind}", c.ranks, c.calls, size(c.bytes), seconds(c.seconds))
        for c in report.charges
    ]
    of_actions = ("action", "stage", "a step", "compute", "tp collectives", "forecast")
    of_charges = ("charged for a step", "ranks", "calls", "bytes", "seconds")
    lines = [
        f"{report.model}: rank {report.rank} of {report.world_size} (pp rank {report.pp_rank}) on "
        f"{report.device}, planned for {report.cluster}",
        "",
        *units.table_lines([of_actions, *actions], left=(0,), indent="  "),
        "",
        *units.table_lines([of_charges, *charges], left=(0,), indent="  "),
    ]
    forecast = report.forecast
    planned_s, likely = float(forecast["step_seconds"]), float(forecast["uncertainty"])
    lines += [
        "",
        f"  optimizer: {seconds(report.seconds['optimizer'])}",
        f"  step of the job: {seconds(report.seconds['step'])} with this rank's stages as "
        f"measured, {seconds(planned_s)} ± {likely:.0%} by the forecast",
        f"  memory: at most {size(report.peak_memory_bytes)} measured, "
        f"{size(int(forecast['peak_memory_bytes']))} ± "
        f"{float(forecast['memory_uncertainty']):.0%} by the forecast (at {forecast['at']}): "
        f"{report.memory_ratio:.3f} of it; {size(int(forecast['cluster_peak_memory_bytes']))} on "
        "the cluster's device",
        *(f"  warning: {sentence}" for sentence in report.warnings),
    ]
    return "\n".join(lines)
