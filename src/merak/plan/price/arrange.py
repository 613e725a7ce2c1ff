"""How a candidate is laid out, as the engine does it: stages, schedule, activation policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from merak.plan.activations.decide import choose_policy
from merak.plan.activations.forecast import Forecast
from merak.plan.activations.offload import NOTHING, parse_offload
from merak.plan.activations.recompute import recomputing_stages
from merak.plan.balance import balance, balance_uneven
from merak.plan.cluster.cluster import Cluster
from merak.plan.cluster.fit import usable_by_pp_rank
from merak.plan.cluster.hierarchy import on_nodes
from merak.plan.constraints import refuse_optional_layers, refuse_reductions, refuse_tied_copies
from merak.plan.cost.device import DeviceProfile
from merak.plan.cost.float8_products import refuse_float8
from merak.plan.layout import check_stages
from merak.plan.partition import Partition, from_sizes
from merak.plan.price.candidate import Candidate
from merak.plan.price.segments import SegmentPrice, price_segments
from merak.plan.price.shared_ranks import RankBalance
from merak.plan.price.stages import (
    boundary_bytes,
    stage_links,
)
from merak.plan.price.workload import Workload
from merak.plan.recompute_spec import Mode, parse_recompute, recomputing_times
from merak.plan.stage_costs import plans_from_costs
from merak.plan.step_plans import StepPlans
from merak.schedule.costs import Link
from merak.schedule.ir import Schedule


@dataclass(frozen=True, slots=True)
class Arranged:
    """A candidate whose stages, schedule and activation policy are chosen.

    Args:
        forecast: its layout with its policy and schedule.
        devices: of every pp rank.
        segments: for every pp rank, the prices of all segments.
    """

    forecast: Forecast
    devices: tuple[DeviceProfile, ...]
    segments: tuple[tuple[SegmentPrice, ...], ...]


def arrange(workload: Workload, cluster: Cluster, candidate: Candidate) -> Arranged:
    """Balance the stages, and choose the schedule and the activation policy, as the engine does."""
    plans = workload.plans(candidate)  # refused before anything is traced
    budget = min(usable(cluster, candidate))
    devices = tuple(_slowest_device(cluster, candidate, rank) for rank in range(candidate.pp))
    if workload.common.fp8:
        refuse_float8(devices)
    priced = {
        id(device): price_segments(workload, candidate, device, cluster) for device in devices
    }
    segments = tuple(priced[id(device)] for device in devices)
    num_stages = plans.base.schedule.num_stages
    check_stages(workload.local_graph(workload.form(candidate)), num_stages, candidate.pp)
    links = stage_links(cluster, candidate, plans.base.schedule)
    slowest = slowest_ranks(plans.base.schedule, devices)
    partition = _partition(workload, candidate, plans, segments, slowest, links)
    fills = None if math.isinf(budget) else int(budget)
    forecast = workload.forecast(candidate, partition, fills, devices[0])
    if plans.takes_costs:
        plans = plans_from_costs(forecast, lambda: segments[0])
        forecast = replace(forecast, layout=replace(forecast.layout, plans=plans))
    levels = forecast.options.hierarchical_reductions != "off"
    placed = on_nodes(forecast.mesh, cluster) if levels else forecast.mesh
    refuse_reductions(forecast.layout.schedule, forecast.options, placed)
    refuse_tied_copies(forecast.layout, candidate.zero)
    if workload.drops_layers(candidate.microbatch):
        refuse_optional_layers(forecast.layout, candidate.zero, forecast.mesh)
    return Arranged(_with_policy(forecast, segments[0], devices[0], fills), devices, segments)


def _partition(
    workload: Workload,
    candidate: Candidate,
    plans: StepPlans,
    segments: Sequence[Sequence[SegmentPrice]],
    ranks: Sequence[int],
    links: Sequence[Link],
) -> Partition:
    """The candidate's own partition, or the balanced one.

    Args:
        workload: the job.
        candidate: how it is laid out.
        plans: of its schedule.
        segments: prices of all segments on the device of every pp rank.
        ranks: of every stage, of several that have it the slowest.
        links: between neighbouring stages.
    """
    schedule = plans.base.schedule
    num_stages, num_segments = schedule.num_stages, len(segments[0])
    if candidate.partition is not None:
        return from_sizes(candidate.partition, num_segments)
    if num_stages == 1:
        return Partition(num_segments, ())
    graph = workload.local_graph(workload.form(candidate))
    sizes = boundary_bytes(graph, Partition(num_segments, tuple(range(1, num_segments))))
    names = [segment.name for segment in graph.segments]
    different = {id(own): recomputing_times(own, names, candidate.recompute) for own in segments}
    kinds = {
        key: tuple((one.forward_s, one.backward_s) for one in own) for key, own in different.items()
    }
    differs = len(set(kinds.values())) > 1 or (len(set(links)) > 1 and len(set(sizes)) > 1)
    times = tuple(kinds[id(segments[rank])] for rank in ranks)
    key = ("balance", times, tuple(links) if differs else (), sizes, candidate.num_microbatches)
    on_ranks = [different[id(own)] for own in segments]
    on_stages = [on_ranks[rank] for rank in ranks]
    count = candidate.num_microbatches
    if differs:
        uneven = partial(balance_uneven, on_stages, count, links=links, cut_bytes=sizes)
        found = workload.once(key, uneven)
        is_shared = any(len(schedule.stages_of(rank)) > 1 for rank in range(candidate.pp))
        if plans.takes_costs or not is_shared:
            return found
        own = RankBalance(schedule, on_ranks, links, sizes)
        shared = (candidate.schedule, str(candidate.schedule_options), candidate.pp, *key)
        return workload.once(shared, lambda: own.best(found))
    return workload.once(key, lambda: balance(on_stages[0], num_stages, count))


def _with_policy(
    forecast: Forecast, times: Sequence[SegmentPrice], device: DeviceProfile, budget: int | None
) -> Forecast:
    """The forecast with the activation policy of its options."""
    options, layout = forecast.options, forecast.layout
    spec = parse_recompute(options.recompute)
    if spec.mode is Mode.SCHEDULE and parse_offload(options.offload_activations) == NOTHING:
        return forecast
    policy = choose_policy(forecast, spec, lambda: times, lambda: device, budget)
    plans = layout.plans.recomputing(recomputing_stages(layout.partition, policy.saved))
    return replace(forecast, layout=replace(layout, plans=plans, activations=policy))


def as_chosen(candidate: Candidate, forecast: Forecast) -> Candidate:
    """The candidate with its partition, and what "auto" recomputes where one word says it."""
    layout = forecast.layout
    policy = layout.activations
    sizes = layout.partition.sizes
    if candidate.recompute != "auto" or policy.selective or policy.offloaded:
        return replace(candidate, partition=sizes)
    every = frozenset(range(layout.partition.num_segments))
    recomputed = every - policy.saved
    word = ",".join(map(str, sorted(recomputed))) + "," if recomputed else "off"
    if recomputed and recomputed == every - forecast.untrained:
        word = "full"
    return replace(candidate, partition=sizes, recompute=word)


def forecast_as_priced(workload: Workload, cluster: Cluster, candidate: Candidate) -> Forecast:
    """Forecast of a candidate with the stages, schedule and policy that its price has.

    Args:
        workload: the job.
        cluster: the devices.
        candidate: how it is laid out.
    """
    return arrange(workload, cluster, candidate).forecast


def usable(cluster: Cluster, candidate: Candidate) -> tuple[float, ...]:
    """Bytes that tensors may fill of the smallest device of every pp rank."""
    return usable_by_pp_rank(cluster, candidate.mesh(0, torch.device("cpu")))


def slowest_ranks(schedule: Schedule, devices: Sequence[DeviceProfile]) -> list[int]:
    """The pp rank of every stage, of several that have it the one with the slowest device."""
    stages = range(schedule.num_stages)
    return [min(schedule.ranks_of(n), key=lambda rank: _rate(devices[rank])) for n in stages]


def _slowest_device(cluster: Cluster, candidate: Candidate, rank: int) -> DeviceProfile:
    """The slowest device of a pp rank's, over all replicas."""
    size = candidate.stage_ranks
    found = cluster.devices_of(range(rank * size, (rank + 1) * size))
    return min(found, key=_rate)


def _rate(device: DeviceProfile) -> float:
    return max(device.flops_per_s.values())
