"""The price of a candidate: a step simulated with the costs of its stages, and its memory.

Nothing runs, and no device is needed: the graph gives FLOPs, bytes and collectives, the devices'
profiles and links the seconds, the engine's own schedule their order, and the memory model peaks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import torch

from merak.plan.cluster.cluster import Cluster
from merak.plan.cluster.fit import HostUse, fullest_host
from merak.plan.cost.calibration import PassSeconds
from merak.plan.memory.model import RankMemory
from merak.plan.memory.zero import ZeroSharding
from merak.plan.partition import MOST_OVER, Partition, move_to_fit
from merak.plan.price.arrange import Arranged, arrange, as_chosen, slowest_ranks, usable
from merak.plan.price.candidate import Candidate
from merak.plan.price.price import Misfit, Price
from merak.plan.price.replicas import (
    StageExchange,
    averaging_seconds,
    exposed_gather_s,
    stage_exchange,
    tied_seconds,
    zero_sharding,
)
from merak.plan.price.segments import model_flops
from merak.plan.price.stages import (
    Stage,
    boundary_bytes,
    costs_of,
    price_stages,
    slower,
    stage_links,
)
from merak.plan.price.uncertainty import MEMORY_UNCERTAINTY, Shares, uncertainty
from merak.plan.price.update import exchange_seconds, home_of, norm_seconds, update_seconds
from merak.plan.price.workload import Workload
from merak.schedule.action_table import tabulate
from merak.schedule.costs import Costs, Link
from merak.schedule.ir import Schedule
from merak.schedule.simulator.simulate import Simulation, durations, simulate


@dataclass(frozen=True, slots=True)
class _Laid(Arranged):
    """A candidate that is laid out.

    Args:
        stages: prices of its stages.
        memory: of every pp rank.
    """

    stages: tuple[Stage, ...]
    memory: tuple[RankMemory, ...]

    @property
    def schedule(self) -> Schedule:
        return self.forecast.layout.schedule


@dataclass(frozen=True, slots=True)
class Boundary:
    """A boundary between two stages.

    Args:
        num_bytes: that cross it for a microbatch.
        link: that they take.
        ranks: the first rank on either side.
    """

    num_bytes: float
    link: Link
    ranks: tuple[int, int]


@dataclass(frozen=True, slots=True)
class StepParts:
    """Parts of a candidate's step, as ranks measure them.

    Args:
        busy_s: of every pp rank, seconds of its actions.
        updates_s: of every pp rank, seconds of the optimizer's step without a clip of gradients;
            empty where updates are amid the actions.
        exchanges: of every pp rank, those of its stage; None where it has several stages, or
            reduces gradients amid its actions.
        boundaries: between every two neighbouring stages.
    """

    busy_s: tuple[float, ...]
    updates_s: tuple[float, ...]
    exchanges: tuple[StageExchange | None, ...]
    boundaries: tuple[Boundary, ...]


def price(
    workload: Workload,
    cluster: Cluster,
    candidate: Candidate,
    known: Mapping[int, Stage] = MappingProxyType({}),
) -> Price:
    """Price one way to lay a job out.

    Args:
        workload: the job.
        cluster: the devices; ranks are counted in the order (pp, dp, cp, tp), tp fastest.
        candidate: how it is laid out. A plan that does not fit a device's memory has a price, too.
        known: stages whose times are known, such as measured ones, in place of estimates.

    Raises:
        PlanError: more ranks than devices, or options that contradict each other.
        ScheduleError: a schedule that is not defined for these counts.
        ShardError: a tp, cp or ep that does not fit the model.
        TraceError: a model that cannot be traced.
    """
    laid = _lay_out(workload, cluster, candidate)
    stages = tuple(known.get(number, stage) for number, stage in enumerate(laid.stages))
    return _price(workload, cluster, candidate, replace(laid, stages=stages))


def price_if_fits(workload: Workload, cluster: Cluster, candidate: Candidate) -> Price | Misfit:
    """Price one way to lay a job out, unless one of its pp ranks has not the memory.

    Where a rank of balanced stages nearly has it, they give segments to ranks with more room. The
    first rank that has not ends it: their memory takes most of the time of a price.
    Arguments and errors are those of `price`.
    """
    arranged = arrange(workload, cluster, candidate)
    forecast, memory = arranged.forecast, list[RankMemory]()
    ranks = forecast.each_rank(forecast.layout.schedule, forecast.policy)
    for own, most in zip(ranks, usable(cluster, candidate), strict=True):
        memory.append(own)
        peak = own.peak.total_bytes
        if peak <= most:
            continue
        nearly = peak <= MOST_OVER * most
        cut = _moved_to_fit(workload, cluster, candidate, arranged) if nearly else None
        if cut is not None:
            return price_if_fits(workload, cluster, replace(candidate, partition=cut.sizes))
        chosen = as_chosen(candidate, forecast)
        return Misfit(candidate=chosen, rank=own.rank, peak_bytes=peak, device_bytes=most)
    host = _host(cluster, candidate, memory)
    if host.usable_bytes is not None and not host.fits:
        needed, most = host.needed_bytes, host.usable_bytes
        chosen = as_chosen(candidate, forecast)
        return Misfit(candidate=chosen, rank=None, peak_bytes=needed, device_bytes=most)
    laid = _with_memory(workload, candidate, arranged, tuple(memory))
    return _price(workload, cluster, candidate, laid)


def _moved_to_fit(
    workload: Workload, cluster: Cluster, candidate: Candidate, arranged: Arranged
) -> Partition | None:
    """Stages of a candidate whose pp ranks all have the memory; None where none were found."""
    if candidate.partition is not None or candidate.pp == 1:
        return None

    # What fits where everything recomputes, "auto" makes fit, in much more time.
    least = "full" if candidate.recompute == "auto" else candidate.recompute

    def filled(partition: Partition) -> list[float]:
        moved = replace(candidate, partition=partition.sizes, recompute=least)
        forecast = arrange(workload, cluster, moved).forecast
        ranks = forecast.ranks(forecast.layout.schedule)
        return [
            own.peak.total_bytes / most
            for own, most in zip(ranks, usable(cluster, candidate), strict=True)
        ]

    layout = arranged.forecast.layout
    return move_to_fit(layout.partition, layout.schedule, filled)


def _price(workload: Workload, cluster: Cluster, candidate: Candidate, laid: _Laid) -> Price:
    """The price of a candidate that is laid out."""
    samples = candidate.microbatch * candidate.num_microbatches * candidate.dp
    flops = model_flops(workload, candidate.microbatch) * candidate.num_microbatches * candidate.dp
    shares, bubble_fraction = _step(workload, cluster, candidate, laid)
    return Price(
        candidate=as_chosen(candidate, laid.forecast),
        step_s=shares.total_s,
        uncertainty=uncertainty(shares),
        compute_s=shares.compute_s,
        bubble_s=shares.bubble_s,
        exposed_communication_s=shares.communication_s,
        tied_s=shares.tied_s,
        optimizer_s=shares.optimizer_s,
        bubble_fraction=bubble_fraction,
        model_flops=flops,
        tokens=samples * workload.tokens_per_sample,
        peak_memory_bytes=tuple(own.peak.total_bytes for own in laid.memory),
        memory_uncertainty=MEMORY_UNCERTAINTY,
        device_bytes=usable(cluster, candidate),
        host=_host(cluster, candidate, laid.memory),
        is_balanced=candidate.partition is None,
    )


def step_parts(workload: Workload, cluster: Cluster, candidate: Candidate) -> StepParts:
    """Price the parts of a step that ranks measure while they train.

    Arguments and errors are those of `price`.
    """
    laid = _lay_out(workload, cluster, candidate)
    schedule, size = laid.schedule, candidate.stage_ranks
    zero = zero_sharding(candidate, workload, laid.forecast.options.float32_gradients)
    exchanges = _exchanges(workload, cluster, candidate, laid, zero)
    updates_s = _updates_s(workload, cluster, laid, zero)
    costs = _costs(workload, cluster, candidate, laid, exchanges, updates_s)
    table = tabulate(schedule)
    seconds = durations(schedule, table, costs)
    busy = np.bincount(table.rank, weights=seconds, minlength=candidate.pp)
    is_apart = schedule.is_synchronous
    span_s = float(busy.max())
    update_s = _rank_updates_s(workload, cluster, candidate, laid, zero, span_s, may_wait=False)
    pipe = schedule.pipes[0]
    return StepParts(
        busy_s=tuple(map(float, busy)),
        updates_s=tuple(update_s) if is_apart else (),
        exchanges=tuple(
            exchanges[own[0]] if is_apart and len(own) == 1 else None
            for own in map(schedule.stages_of, range(candidate.pp))
        ),
        boundaries=tuple(
            Boundary(num_bytes, link, (pipe[n] * size, pipe[n + 1] * size))
            for n, (num_bytes, link) in enumerate(zip(costs.boundary_bytes, costs.links))
        ),
    )


def memory_of(workload: Workload, cluster: Cluster, candidate: Candidate) -> tuple[RankMemory, ...]:
    """Memory of every pp rank of a candidate by category, of which `price` gives the peaks.

    Arguments and errors are those of `price`.
    """
    return _lay_out(workload, cluster, candidate).memory


def priced_stages(workload: Workload, cluster: Cluster, candidate: Candidate) -> tuple[Stage, ...]:
    """Price the stages of a candidate, each by itself.

    Args:
        workload: the job.
        cluster: the devices.
        candidate: how it is laid out.
    """
    return _lay_out(workload, cluster, candidate).stages


def _lay_out(workload: Workload, cluster: Cluster, candidate: Candidate) -> _Laid:
    """Arrange a candidate, and price its stages and memory."""
    arranged = arrange(workload, cluster, candidate)
    memory = arranged.forecast.ranks(arranged.forecast.layout.schedule)
    return _with_memory(workload, candidate, arranged, memory)


def _with_memory(
    workload: Workload, candidate: Candidate, arranged: Arranged, memory: tuple[RankMemory, ...]
) -> _Laid:
    """Price the stages of a candidate that is arranged, whose memory is known."""
    forecast, devices, segments = arranged.forecast, arranged.devices, arranged.segments
    layout = forecast.layout
    graph = workload.local_graph(workload.form(candidate))
    stages = price_stages(
        graph,
        [segments[rank] for rank in slowest_ranks(layout.schedule, devices)],
        layout.partition,
        forecast.policy,
        forecast.memory.segments,
        candidate.splits,
    )
    return _Laid(forecast, devices, segments, stages, memory)


def _step(
    workload: Workload, cluster: Cluster, candidate: Candidate, laid: _Laid
) -> tuple[Shares, float]:
    """The seconds of a step by cause, and the bubble fraction."""
    schedule, stages, forecast = laid.schedule, laid.stages, laid.forecast
    zero = zero_sharding(candidate, workload, forecast.options.float32_gradients)
    local = forecast.options.local_steps
    exchanges = _exchanges(workload, cluster, candidate, laid, zero)
    updates_s = _updates_s(workload, cluster, laid, zero)
    costs = _costs(workload, cluster, candidate, laid, exchanges, updates_s)
    simulation = simulate(schedule, costs)
    busy = _busy(simulation, durations(schedule, simulation.table, costs))
    nothing = [0.0] * len(stages)
    alone = costs_of([s.compute for s in stages], costs.links, costs.boundary_bytes, nothing)
    alone = replace(alone, rank_factors=costs.rank_factors)
    compute = _busy(simulation, durations(schedule, simulation.table, alone))
    rank = int(np.argmax(busy))
    ends_s = float(simulation.end.max(initial=0.0))
    exact = forecast.options.exact_tied_gradients
    tied_s = tied_seconds(forecast.layout, stages, cluster, candidate, zero, exact)
    late_s = tied_s + exposed_gather_s(stages, exchanges)
    late_s += max(
        averaging_seconds(
            [stages[n] for n in schedule.stages_of(own)], cluster, candidate, zero, local
        )
        for own in range(candidate.pp)
    )
    inside_s = sum(updates_s.get(n, 0.0) for n in schedule.stages_of(rank))
    inside_s *= candidate.num_microbatches // schedule.microbatches_per_update
    span_s = simulation.makespan
    behind_s = _update_s(workload, cluster, candidate, laid, zero, span_s)
    optimizer_s = inside_s if updates_s else behind_s
    launch_s = _launch_seconds(laid, schedule, rank, candidate)
    exposed_s = float(busy[rank] - compute[rank]) - inside_s + simulation.makespan - ends_s
    shares = Shares(
        compute_s=float(compute[rank]),
        bubble_s=ends_s - float(busy[rank]),
        communication_s=max(0.0, exposed_s) + late_s,  # sums of many numbers: none may be -1e-18
        optimizer_s=optimizer_s,
        launch_s=launch_s,
        tied_s=tied_s,
    )
    idle = 1.0 - float(busy.sum()) / (candidate.pp * ends_s) if ends_s else 0.0
    return shares, max(0.0, idle)


def _exchanges(
    workload: Workload, cluster: Cluster, candidate: Candidate, laid: _Laid, zero: ZeroSharding
) -> list[StageExchange]:
    """What the replicas of every stage exchange."""
    return [
        stage_exchange(stage, number, cluster, candidate, laid.schedule, zero, workload)
        for number, stage in enumerate(laid.stages)
    ]


def _costs(
    workload: Workload,
    cluster: Cluster,
    candidate: Candidate,
    laid: _Laid,
    exchanges: Sequence[StageExchange],
    updates_s: Mapping[int, float],
) -> Costs:
    """Costs of a candidate's actions, for the simulator, with updates amid them."""
    hides = workload.kernels.hides_reductions
    reduction_s = [own.reduction_s if hides else own.unhidden_reduction_s for own in exchanges]
    whole = [
        slower(stage.whole, exchange.passes, PassSeconds(wait_s, wait_s, wait_s, wait_s, 0.0))
        for stage, exchange, wait_s in zip(
            laid.stages, exchanges, _offload_waits(laid), strict=True
        )
    ]
    graph = workload.local_graph(workload.form(candidate))
    links = stage_links(cluster, candidate, laid.schedule)
    sizes = boundary_bytes(graph, laid.forecast.layout.partition)
    waits_s = [own_s + updates_s.get(n, 0.0) for n, own_s in enumerate(reduction_s)]
    return replace(costs_of(whole, links, sizes, waits_s), rank_factors=_rank_factors(laid))


def _rank_factors(laid: _Laid) -> tuple[tuple[float, ...], ...]:
    """Times of a stage's copies, in times of that on the slowest rank, as `Costs` takes them."""
    slowest, parts = (
        slowest_ranks(laid.schedule, laid.devices),
        laid.forecast.layout.partition.stages,
    )
    if laid.schedule.num_copies == 1 or len({id(own) for own in laid.segments}) == 1:
        return ()
    seconds = [
        [sum((own[i].forward_s + own[i].backward_s for i in part), 1e-30) for part in parts]
        for own in laid.segments
    ]
    return tuple(
        tuple(own / seconds[slowest[n]][n] for n, own in enumerate(row)) for row in seconds
    )


def _updates_s(
    workload: Workload, cluster: Cluster, laid: _Laid, zero: ZeroSharding
) -> dict[int, float]:
    """Seconds of every update of a stage that a schedule makes amid its actions, without a clip."""
    if laid.schedule.is_synchronous:
        return {}
    home = home_of(cluster, laid.forecast.options.offload_optimizer)
    return {
        own.stage: update_seconds(
            [(laid.stages[own.stage], own)],
            device,
            zero,
            workload.is_optimizer_fused,
            home,
            waits=False,
        )
        for memory, device in zip(laid.memory, laid.devices, strict=True)
        for own in memory.stages
    }


def _update_s(
    workload: Workload,
    cluster: Cluster,
    candidate: Candidate,
    laid: _Laid,
    zero: ZeroSharding,
    span_s: float,
) -> float:
    """Seconds of the one update behind a step, and of its exchanges, on the slowest rank."""
    seconds = _rank_updates_s(workload, cluster, candidate, laid, zero, span_s)
    exchanged = map(laid.forecast.memory.exchange, range(candidate.pp))
    slowest_s = max(
        own_s + exchange_seconds(cluster, candidate, own)
        for own_s, own in zip(seconds, exchanged, strict=True)
    )
    return slowest_s + norm_seconds(cluster, candidate)


def _rank_updates_s(
    workload: Workload,
    cluster: Cluster,
    candidate: Candidate,
    laid: _Laid,
    zero: ZeroSharding,
    span_s: float,
    *,
    may_wait: bool = True,
) -> list[float]:
    """Seconds of the one update on every pp rank, behind the step or beside its last backward.

    A delayed one has all of the next step beside it, of `span_s`.
    """
    ranks = zip(laid.memory, laid.devices, strict=True)
    held = [([(laid.stages[own.stage], own) for own in m.stages], device) for m, device in ranks]
    home, is_fused = home_of(cluster, candidate.offload_optimizer), workload.is_optimizer_fused
    waits = may_wait and not workload.steps_beside_backward
    return [
        update_seconds(
            *own,
            zero,
            is_fused,
            home,
            waits=waits,
            backward_s=sum(stage.whole.backward_s for stage, _ in own[0]),
            span_s=span_s if laid.forecast.options.delay_optimizer_update else None,
        )
        for own in held
    ]


def _busy(simulation: Simulation, seconds: np.ndarray) -> np.ndarray:
    """Seconds of the actions of every pp rank."""
    return np.bincount(
        simulation.table.rank, weights=seconds, minlength=simulation.schedule.num_ranks
    )


def _launch_seconds(laid: _Laid, schedule: Schedule, rank: int, candidate: Candidate) -> float:
    """Seconds of a step in which a pp rank's device waits for kernels to start."""
    own = [
        i
        for stage in schedule.stages_of(rank)
        for i in laid.forecast.layout.partition.stages[stage]
    ]
    return candidate.num_microbatches * sum(laid.segments[rank][i].launch_s for i in own)


def _offload_waits(laid: _Laid) -> list[float]:
    """Seconds of every stage that copies of offloaded activations take beyond its computation."""
    layout = laid.forecast.layout
    stages = layout.partition.stages
    offloaded = layout.activations.offloaded
    if not offloaded:
        return [0.0] * len(stages)
    sizes = laid.forecast.offload_bytes()
    return [
        max(
            0.0,
            sum(sizes[i] for i in own if i in offloaded) / laid.devices[rank].host_bytes_per_s
            - stage.whole.forward_s,
        )
        for own, stage, rank in zip(stages, laid.stages, layout.stage_rank, strict=True)
    ]


def _host(cluster: Cluster, candidate: Candidate, memory: Sequence[RankMemory]) -> HostUse:
    mesh = candidate.mesh(0, torch.device("cpu"))
    return fullest_host(cluster, mesh, [own.host.total for own in memory])


def simulated_pipeline(workload: Workload, cluster: Cluster, candidate: Candidate) -> Simulation:
    """Simulate the pipeline of a candidate as its price has it, to be drawn.

    Args:
        workload: the job.
        cluster: the devices.
        candidate: how it is laid out.
    """
    laid = _lay_out(workload, cluster, candidate)
    zero = zero_sharding(candidate, workload, laid.forecast.options.float32_gradients)
    exchanges = _exchanges(workload, cluster, candidate, laid, zero)
    updates_s = _updates_s(workload, cluster, laid, zero)
    costs = _costs(workload, cluster, candidate, laid, exchanges, updates_s)
    return simulate(laid.schedule, costs)
