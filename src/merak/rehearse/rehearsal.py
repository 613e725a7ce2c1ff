"""The rehearsal: one rank of a planned job runs on this device, and its peers are charged for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from merak.core.elastic import Degrees
from merak.core.errors import MeshError, PlanError
from merak.core.mesh import Mesh
from merak.engine.build import build_with_forecast
from merak.engine.planning.reductions import is_hierarchy_faster
from merak.engine.step.loss_scale import LossScale
from merak.parallel import ParallelModel
from merak.plan.activations.forecast import Forecast
from merak.plan.cluster.cluster import Cluster
from merak.plan.cluster.hierarchy import on_nodes
from merak.plan.cost.calibration import PassSeconds
from merak.plan.memory.model import RankMemory
from merak.plan.price.candidate import Candidate
from merak.plan.price.price import Price
from merak.plan.price.stages import Stage
from merak.plan.price.step import price, priced_stages
from merak.plan.price.workload import Workload
from merak.rehearse.charge import Charge, charges, seconds_inside
from merak.rehearse.fake_group import Traffic
from merak.rehearse.fake_job import fake_job
from merak.rehearse.measure import Measured, Place, measure_steps
from merak.schedule.ir import Kind

_MAX_GRAD_NORM = 1.0
"""Of `TrainingArguments`, by default."""


@dataclass(frozen=True, slots=True)
class ActionSeconds:
    """Seconds of the actions of one kind and stage.

    Args:
        kind: of the action: "F", "R", "B", "I" or "W".
        stage: of the model.
        count: of them in a step.
        measured_s: computation of one, here.
        charged_s: its collectives over tp and cp, by the cost model.
        forecast_s: of one, computation and collectives, as the plan had it.
    """

    kind: str
    stage: int
    count: int
    measured_s: float
    charged_s: float
    forecast_s: float


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Rehearsal of one rank of a plan.

    Args:
        candidate: the plan, with its partition and everything that "auto" has chosen.
        mesh: the degrees, the rank and the device that it ran on.
        actions: of the rank.
        charges: of the rank's collectives and transfers in a step.
        optimizer_s: measured seconds of the optimizer's step.
        own_s: measured seconds of a whole step of this rank, which waited for nobody.
        step_s: of a step of the job, with the rank's stages as measured and the others as forecast.
        peak_bytes: measured.
        memory: forecast of this rank, for the device that it ran on.
        planned: the price of the plan, on the cluster's devices.
        warnings: sentences on what differs by more than the forecast's uncertainty.
    """

    candidate: Candidate
    mesh: Mesh
    actions: tuple[ActionSeconds, ...]
    charges: tuple[Charge, ...]
    optimizer_s: float
    own_s: float
    step_s: float
    peak_bytes: int
    memory: RankMemory
    planned: Price
    warnings: tuple[str, ...]

    @property
    def memory_ratio(self) -> float:
        """Measured ÷ forecast peak."""
        return self.peak_bytes / self.memory.peak.total_bytes


def rehearse(
    workload: Workload,
    cluster: Cluster,
    candidate: Candidate,
    rank: int,
    batch: Mapping[str, torch.Tensor],
    *,
    device: torch.device,
    steps: int = 3,
) -> Rehearsal:
    """Run one rank of a plan alone: the real engine, its schedule, optimizer and shards.

    Weights are initialised, not read. Values are not those of a training: peers answer with what
    this rank has, and received activations are small random numbers.

    Args:
        workload: the job; its model becomes this rank's.
        cluster: what the plan is for; its links are charged.
        candidate: the plan.
        rank: of the job, 0 … world size − 1.
        batch: of one step of one replica, in host memory.
        device: where it runs.
        steps: that are timed, after three that warm up and measure memory and traffic.

    Raises:
        PlanError: the plan does not fit the cluster, or too few steps.
        MeshError: there is no such rank.
        MerakError: the plan does not fit the model.
    """
    mesh = candidate.mesh(rank, device)
    refuse_rank(mesh, steps)
    planned = price(workload, cluster, candidate)
    chosen = planned.candidate
    stages = priced_stages(workload, cluster, chosen)
    traffic = Traffic()
    measured, forecast = _run(workload, cluster, chosen, mesh, batch, traffic, steps)
    inside = seconds_inside(measured.calls, mesh, cluster, measured.actions, chosen.zero)
    known = {
        number: _known(stages[number], measured, inside, number, chosen)
        for number in {stage for _, stage in measured.action_s}
    }
    step_s = price(workload, cluster, chosen, known).step_s
    memory = forecast.ranks(forecast.layout.plans.base.schedule)[mesh.pp_rank]
    found = Rehearsal(
        candidate=chosen,
        mesh=mesh,
        actions=tuple(_actions(measured, inside, stages)),
        charges=charges(measured.calls, mesh, cluster),
        optimizer_s=measured.optimizer_s,
        own_s=measured.step_s,
        step_s=step_s + max(0.0, measured.optimizer_s - planned.optimizer_s),
        peak_bytes=measured.peak_bytes,
        memory=memory,
        planned=planned,
        warnings=(),
    )
    return replace(found, warnings=tuple(_warnings(found, cluster)))


def refuse_rank(mesh: Mesh, steps: int) -> None:
    """Refuse a rank that the job does not have, and a rehearsal that times nothing.

    Args:
        mesh: the degrees and the rank.
        steps: that are timed.

    Raises:
        PlanError: too few steps.
        MeshError: there is no such rank.
    """
    if steps < 1:
        raise PlanError(f"{steps=} times nothing; use 1 or more.")
    if not 0 <= mesh.rank < mesh.world_size:
        raise MeshError(
            f"rank {mesh.rank} is none of the {mesh.world_size} ranks of "
            f"{Degrees(mesh.dp, mesh.tp, mesh.pp, mesh.cp)}; use 0 to {mesh.world_size - 1}."
        )


def _run(
    workload: Workload,
    cluster: Cluster,
    candidate: Candidate,
    mesh: Mesh,
    batch: Mapping[str, torch.Tensor],
    traffic: Traffic,
    steps: int,
) -> tuple[Measured, Forecast]:
    """Measure the rank, and forecast its memory on the device that it runs on."""
    planned_for = cluster.place(mesh.rank)[0].device
    options = replace(workload.options(candidate), recorded_steps=steps, device_profile=planned_for)
    if options.hierarchical_reductions != "off":
        mesh = on_nodes(mesh, cluster)
    if options.hierarchical_reductions == "auto":
        is_faster = is_hierarchy_faster(mesh, workload.model, options, cluster)
        options = replace(options, hierarchical_reductions="on" if is_faster else "off")
    before_bytes = torch.cuda.memory_allocated(mesh.device) if mesh.device.type == "cuda" else 0
    with fake_job(mesh, traffic) as connected:
        sample = workload.columns(candidate.microbatch)
        engine, forecast = build_with_forecast(workload.source, sample, connected, options)
        model = ParallelModel(
            workload.model,
            engine,
            candidate.num_microbatches,
            workload.optimizer,
            None if engine.updates_inside else _MAX_GRAD_NORM,
            LossScale(mesh.device) if workload.autocast == torch.float16 else None,
        )
        constants = list(forecast.layout.graph.constants.values())
        measured = measure_steps(model, batch, traffic, steps, before_bytes, constants)
    if mesh.device.type != planned_for.device_type:  # whose kernels save other tensors
        forecast = replace(forecast, options=replace(forecast.options, device_profile=None))
    return measured, forecast


def _known(
    stage: Stage,
    measured: Measured,
    inside: Mapping[Place, float],
    number: int,
    candidate: Candidate,
) -> Stage:
    """A stage with measured computation and charged collectives."""
    is_beside = candidate.splits
    compute = _stage_times(measured.action_s, number)
    combined = {
        place: max(seconds, inside[place]) if is_beside else seconds + inside[place]
        for place, seconds in measured.action_s.items()
    }
    return replace(stage, compute=compute, whole=_stage_times(combined, number))


def _stage_times(action_s: Mapping[Place, float], stage: int) -> PassSeconds:
    """Times of a stage; what is recomputed inside a backward is a part of it."""
    return PassSeconds(
        forward_s=action_s.get((Kind.FORWARD, stage), 0.0),
        recompute_s=action_s.get((Kind.RECOMPUTE, stage), 0.0),
        backward_s=action_s.get((Kind.BACKWARD, stage), 0.0),
        input_gradient_s=action_s.get((Kind.INPUT_GRADIENT, stage), 0.0),
        weight_gradient_s=action_s.get((Kind.WEIGHT_GRADIENT, stage), 0.0),
    )


def _actions(
    measured: Measured, inside: Mapping[Place, float], stages: tuple[Stage, ...]
) -> Iterator[ActionSeconds]:
    for place, count in sorted(measured.actions.items(), key=lambda own: own[0][1]):
        kind, number = place
        times = stages[number].whole
        replays = (Kind.RECOMPUTE, number) not in measured.actions
        forecast_s = {
            Kind.FORWARD: times.forward_s,
            Kind.RECOMPUTE: times.recompute_s,
            Kind.BACKWARD: times.backward_s + times.recompute_s * replays,
            Kind.INPUT_GRADIENT: times.input_gradient_s + times.recompute_s * replays,
            Kind.WEIGHT_GRADIENT: times.weight_gradient_s,
        }[kind]
        seconds = measured.action_s[place]
        yield ActionSeconds(kind.value, number, count, seconds, inside[place], forecast_s)


def _warnings(found: Rehearsal, cluster: Cluster) -> Iterator[str]:
    """Sentences on what a user should look at."""
    expected = found.planned.memory_uncertainty
    peak = found.memory.peak.total_bytes
    if abs(found.memory_ratio - 1) > expected:
        yield (
            f"rank {found.mesh.rank} held {found.peak_bytes:,} bytes at most, "
            f"{found.memory_ratio - 1:+.0%} of the forecast's {peak:,}, which is more than its "
            f"uncertainty of ±{expected:.0%}; leave that much more room."
        )
    own = cluster.place(found.mesh.rank)[0].device
    here = device_name(found.mesh.device)
    if not same_device(here, own.name):
        yield (
            f"computation was measured on {here}, not on the cluster's {own.name}: its seconds, "
            "and the step's, are of this device."
        )
        return
    measured = sum(action.count * action.measured_s for action in found.actions)
    charged = sum(action.count * action.charged_s for action in found.actions)
    forecast = sum(action.count * action.forecast_s for action in found.actions)
    limit = found.planned.uncertainty
    if forecast and abs((measured + charged) / forecast - 1) > limit:
        yield (
            f"rank {found.mesh.rank} computes {measured + charged:.4f} s a step, the forecast had "
            f"{forecast:.4f} s, and an uncertainty of ±{limit:.0%}; balance with its measured "
            "times (merak profile)."
        )


def device_name(device: torch.device) -> str:
    """Name of a device of this machine, for people to read."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


def same_device(here: str, planned: str) -> bool:
    """Whether a name that torch gives a device is that of a data sheet.

    Args:
        here: such as "NVIDIA H100 80GB HBM3".
        planned: such as "h100-sxm".
    """
    model = next((word for word in _words(planned) if any(map(str.isdigit, word))), planned)
    return model in _words(here)


def _words(name: str) -> list[str]:
    return name.lower().replace("-", " ").split()
