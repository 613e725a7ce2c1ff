"""Report of `merak memory`: the bytes of every stage, and the peak of every pp rank."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from merak.core.units import counted, size, table_lines
from merak.plan.memory.non_tensor import NonTensorMemory
from merak.plan.memory.on_autograd import OnAutograd

if TYPE_CHECKING:
    from merak.core.mesh import Mesh
    from merak.plan.activations.forecast import Forecast
    from merak.plan.activations.offload_time import Estimate
    from merak.plan.cluster.cluster import Cluster
    from merak.plan.cluster.fit import HostUse
    from merak.plan.cost.device import DeviceProfile
    from merak.plan.memory.model import RankMemory
    from merak.schedule.ir import Schedule


@dataclass(frozen=True, slots=True)
class StageReport:
    """Memory of one stage, in bytes.

    Args:
        stage: its number.
        ranks: the pp ranks that hold it.
        segments: its segments.
        recomputed: how many of them are recomputed.
        offloaded: how many of them are offloaded.
        parameters: of its parameters.
        gradients: of their gradients, as they are between microbatches.
        optimizer: of the optimizer's state, masters included.
        activations: the most that its microbatches take at a time.
        total: all of it.
    """

    stage: int
    ranks: list[int]
    segments: int
    recomputed: int
    offloaded: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    total: int


@dataclass(frozen=True, slots=True)
class RankReport:
    """Peak memory of a pp rank.

    Args:
        rank: the pp rank.
        peak: bytes, at the peak.
        at: the action that runs then; "update" for the optimizer's step.
        at_seconds: when it begins in the simulated iteration.
        parts: bytes at that moment, by what they are for.
        host: bytes in host memory.
        host_parts: of it, by what they are for.
        disk: bytes of the optimizer in files.
    """

    rank: int
    peak: int
    at: str
    at_seconds: float
    parts: dict[str, int]
    host: int
    host_parts: dict[str, int]
    disk: int = 0


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Report of the memory of a job.

    Args:
        model: the architecture's class name.
        schedule: the pipeline schedule.
        microbatches: of a step.
        seconds: of one simulated iteration, by the speeds of this machine.
        recomputed: numbers of the segments that recompute.
        offloaded: numbers of those that are offloaded.
        stages: what every stage takes.
        ranks: peak memory of every pp rank.
        device: whose figures they are.
        assumed: what is not of this machine but assumed, for people to read; None for nothing.
        device_bytes: memory of the device by its data sheet; None where it has none.
        usable_bytes: of each pp rank's device, what is left for tensors; None where unknown.
        host_ranks: ranks of the host that has the least memory left; of all where no cluster says.
        host_bytes: that they have in its memory.
        usable_host_bytes: of its memory, beside their processes; None where it is not known.
        fits: whether every pp rank's peak, and what a host holds, are at most that; None where the
            device's memory is unknown.
        non_tensor_bytes: of the device, that hold no tensor, by what they are for; None where its
            memory is not known.
        on_autograd: segments whose backward autograd runs, by reason.
    """

    model: str
    schedule: str
    microbatches: int
    seconds: float
    recomputed: list[int]
    offloaded: list[int]
    stages: list[StageReport]
    ranks: list[RankReport]
    device: str
    assumed: str | None = None
    device_bytes: int | None = None
    usable_bytes: list[int] | None = None
    host_ranks: int = 0
    host_bytes: int = 0
    usable_host_bytes: int | None = None
    fits: bool | None = None
    non_tensor_bytes: dict[str, int] | None = None
    on_autograd: tuple[OnAutograd, ...] = ()


def report_on(
    name: str,
    forecast: Forecast,
    cache: Path | None,
    usable: tuple[float, ...] | None = None,
    cluster: Cluster | None = None,
) -> MemoryReport:
    """Report a forecast.

    Args:
        name: of the model.
        forecast: of the job.
        cache: where measured speeds of this machine are cached.
        usable: bytes that each pp rank's tensors may fill; None where they are not known.
        cluster: the devices, whose hosts hold what is offloaded; None for one host of all ranks.
    """
    from merak.plan.activations.fit import simulated
    from merak.plan.cluster.fit import non_tensor_on
    from merak.plan.expected.speed import known_profile
    from merak.plan.layout import segment_times, speeds

    layout, policy = forecast.layout, forecast.policy
    sheet = forecast.options.device_profile
    others = None if sheet is None else non_tensor_on(sheet, forecast.mesh)
    times = segment_times(layout.graph, forecast.options, forecast.mesh, cache)
    speed = forecast.options.host_bytes_per_s
    if speed is None:
        own = speeds(forecast.options, forecast.mesh, cache) if policy.offloaded else None
        speed = math.inf if own is None else own.host_bytes_per_s
    known = known_profile(forecast.options, forecast.mesh, cache)
    found = simulated(forecast, policy, forecast.timed(times, known), speed)
    schedule = forecast.recomputing(layout.schedule, policy.saved)
    ranks = forecast.ranks(schedule)
    if usable is not None and math.inf in usable:
        usable = None
    host = _host(forecast.mesh, ranks, cluster)
    return MemoryReport(
        model=name,
        schedule=layout.schedule.name,
        microbatches=layout.schedule.num_microbatches,
        seconds=found.iteration_s,
        recomputed=sorted(set(range(layout.partition.num_segments)) - policy.saved),
        offloaded=sorted(policy.offloaded),
        stages=_stages(forecast, ranks),
        ranks=[_rank(rank, schedule, found) for rank in ranks],
        device=forecast.mesh.device.type if sheet is None else sheet.name,
        assumed=None if sheet is None else _assumed(sheet, forecast.mesh.device.type),
        device_bytes=None if sheet is None else sheet.memory_bytes,
        usable_bytes=None if usable is None else [int(most) for most in usable],
        host_ranks=host.num_ranks,
        host_bytes=host.needed_bytes,
        usable_host_bytes=host.usable_bytes,
        fits=None
        if usable is None
        else host.fits
        and all(rank.peak.total_bytes <= most for rank, most in zip(ranks, usable, strict=True)),
        non_tensor_bytes=None if others is None else asdict(others),
        on_autograd=forecast.on_autograd,
    )


def _host(mesh: Mesh, ranks: tuple[RankMemory, ...], cluster: Cluster | None) -> HostUse:
    """The host with least memory left; all ranks are on one where no cluster says it."""
    from merak.plan.cluster.fit import HostUse, fullest_host

    held = [rank.host.total for rank in ranks]
    if cluster is not None:
        return fullest_host(cluster, mesh, held)
    return HostUse(mesh.world_size, sum(held) * mesh.replicas * mesh.tp) if any(held) else HostUse()


def _assumed(sheet: DeviceProfile, traced_for: str) -> str:
    """Describe what rests on a data sheet, and on operators of another device."""
    kernels = (
        "; the model is traced for the CPU, with attention and dropout as a GPU's kernels keep "
        "their results; what other kernels take beside theirs is the CPU's"
        if traced_for == "cpu"
        else ""
    )
    return f"times come from the data sheet of {sheet.name}, nothing is measured{kernels}"


def _stages(forecast: Forecast, ranks: tuple[RankMemory, ...]) -> list[StageReport]:
    """Make a row for each stage; where several ranks hold one, that of the rank with most bytes."""
    found: dict[int, StageReport] = {}
    for rank in ranks:
        for stage in rank.stages:
            own = forecast.layout.partition.stages[stage.stage]
            row = StageReport(
                stage=stage.stage,
                ranks=list(forecast.layout.schedule.ranks_of(stage.stage)),
                segments=len(own),
                recomputed=sum(index not in forecast.saved for index in own),
                offloaded=sum(index in forecast.layout.activations.offloaded for index in own),
                parameters=stage.parameters,
                gradients=stage.gradients,
                optimizer=stage.optimizer,
                activations=stage.activations,
                total=stage.total,
            )
            known = found.get(stage.stage)
            if known is None or row.total > known.total:
                found[stage.stage] = row
    return [found[stage] for stage in sorted(found)]


def _rank(rank: RankMemory, schedule: Schedule, found: Estimate) -> RankReport:
    labels = schedule.labels(rank.rank)
    at_seconds = found.iteration_s
    if rank.peak.at in labels:
        at_seconds = found.starts_s[rank.rank][labels.index(rank.peak.at)]
    parts = {part.value: held for part, held in rank.peak.by_category.items() if held}
    return RankReport(
        rank.rank,
        rank.peak.total_bytes,
        rank.peak.at,
        at_seconds,
        parts,
        rank.host.total,
        {part: held for part, held in asdict(rank.host).items() if held},
        rank.disk_bytes,
    )


def page(report: MemoryReport) -> str:
    """Format a report for people."""
    columns = ("parameters", "gradients", "optimizer", "activations", "total")
    rows = [
        (row.stage, row.segments, *(size(getattr(row, column)) for column in columns))
        for row in report.stages
    ]
    lines = [
        f"{report.model}: {report.schedule} with {counted(report.microbatches, 'microbatch')}; "
        f"recomputed: {counted(len(report.recomputed), 'segment')}"
        + (f", offloaded: {counted(len(report.offloaded), 'segment')}" if report.offloaded else ""),
        "",
        *table_lines([("stage", "segments", *columns), *rows], indent="  "),
        "",
    ]
    if report.assumed is not None:
        lines += [f"  assumed: {report.assumed}", ""]
    lines += [f"  {own}" for own in report.on_autograd] + [""] * bool(report.on_autograd)
    for rank in report.ranks:
        fraction = rank.at_seconds / report.seconds if report.seconds else 0.0
        lines.append(
            f"  pp rank {rank.rank}: at most {size(rank.peak)}, at {rank.at} "
            f"({fraction:.0%} into the iteration)"
            + (f", and {size(rank.host)} in host memory" if rank.host else "")
            + (f", {size(rank.disk)} in files" if rank.disk else "")
        )
    if report.host_bytes:
        parts = ", ".join(
            f"{part} {size(max(rank.host_parts.get(part, 0) for rank in report.ranks))}"
            for part in dict.fromkeys(part for rank in report.ranks for part in rank.host_parts)
        )
        of = "" if report.usable_host_bytes is None else f" of {size(report.usable_host_bytes)}"
        lines.append(
            f"  a host of {counted(report.host_ranks, 'rank')}: {size(report.host_bytes)}{of} in "
            f"host memory; of a rank at most: {parts}"
        )
    return "\n".join(lines + _fit(report))


def _fit(report: MemoryReport) -> list[str]:
    """Whether the job fits the device, where its memory is known."""
    usable = report.usable_bytes
    if report.device_bytes is None or usable is None:
        return []
    has = (
        f"  {report.device} has {size(report.device_bytes)}, {size(min(usable))} of it for tensors:"
    )
    others = []
    if report.non_tensor_bytes is not None:
        others = [f"  not for tensors: {NonTensorMemory(**report.non_tensor_bytes)}"]
    if report.fits:
        return ["", f"{has} the job fits", *others]
    short = [
        str(rank.rank) for rank, most in zip(report.ranks, usable, strict=True) if rank.peak > most
    ]
    where = [f"pp rank{'s' * (len(short) > 1)} {', '.join(short)}"] if short else []
    if report.usable_host_bytes is not None and report.host_bytes > report.usable_host_bytes:
        where.append("the memory of a host")
    return ["", f"{has} the job does not fit ({', '.join(where)})", *others]
