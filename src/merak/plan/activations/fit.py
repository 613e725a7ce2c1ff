"""Placement of all activations where memory is short, rank by rank, by the simulated iteration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from merak.plan.activation_policy import ActivationPolicy
from merak.plan.activations.forecast import Forecast
from merak.plan.activations.offload_time import Estimate, Work, estimate
from merak.plan.activations.placement import Placement, PlacementOptions, choose_placement
from merak.plan.activations.recompute import Recomputable
from merak.plan.cost.measured_times import SegmentTimes
from merak.plan.cost.selective_ops import SelectiveOps


@dataclass(frozen=True, slots=True)
class Budget:
    """Memory, time and bandwidth that a placement of activations may spend.

    Args:
        device_bytes: bytes that a rank may hold.
        times: of the segments.
        host_bytes_per_s: of a rank's link to host memory, in each direction while both are used.
        selective: by segment, the operators worth saving where it recomputes.
        may_recompute: whether segments may recompute; else all of them save their activations.
    """

    device_bytes: int
    times: Sequence[Recomputable]
    host_bytes_per_s: float
    selective: Mapping[int, SelectiveOps]
    may_recompute: bool


def fit_activations(forecast: Forecast, saved: frozenset[int], budget: Budget) -> ActivationPolicy:
    """The activation policy that fits every rank with the shortest simulated iteration.

    Ranks are decided one after another. Where one does not fit at all, nothing of it stays on the
    device.

    Args:
        forecast: the job as it is laid out.
        saved: segments that save their activations, or may.
        budget: what the policy may spend.
    """
    trained = saved - forecast.untrained
    decided = Placement(on_device=trained)
    for rank in range(forecast.mesh.pp):
        own = trained & frozenset(forecast.segments_of(rank))
        others = decided.within(trained - own)
        # The placement that another rank of the same stages has got may do here, too.
        known = decided.within(own)
        if rank and known.offloaded | (own - known.saved) and _fits(forecast, rank, known, budget):
            continue
        decided = others | _decide_rank(forecast, rank, (others, own), budget)
    return _policy(decided, forecast, budget.selective)


def simulated(
    forecast: Forecast,
    policy: ActivationPolicy,
    times: Sequence[Recomputable],
    host_bytes_per_s: float,
) -> Estimate:
    """The simulated iteration of a job, with the copies of offloaded activations.

    Args:
        forecast: the job as it is laid out.
        policy: what is saved, recomputed and offloaded.
        times: of the segments.
        host_bytes_per_s: of a rank's link to host memory, in each direction while both are used.
    """
    layout, tp = forecast.layout, forecast.mesh.tp
    offload_bytes = forecast.offload_bytes()
    recompute_s = {
        i: forecast.recompute_s(times, i, policy.selective.get(i)) / tp
        for i in range(layout.partition.num_segments)
        if i not in policy.saved and i not in forecast.untrained
    }
    work = Work(
        layout.partition,
        # Times are of whole segments, and bytes those of a rank's shard.
        [SegmentTimes("", time.forward_s / tp, time.backward_s / tp) for time in times],
        recompute_s,
        {i: offload_bytes[i] for i in policy.offloaded if offload_bytes[i]},
        host_bytes_per_s,
    )
    return estimate(forecast.recomputing(layout.schedule, policy.saved), work)


def _decide_rank(
    forecast: Forecast, rank: int, context: tuple[Placement, frozenset[int]], budget: Budget
) -> Placement:
    """The placement of one rank's own segments, beside that of the others'."""
    others, own = context
    schedule, offload_bytes = forecast.layout.schedule, forecast.offload_bytes()
    segments, partial = forecast.choices(rank, schedule, budget.times, budget.selective, own)
    copy_s = {i: 2 * offload_bytes[i] / budget.host_bytes_per_s for i in own if offload_bytes[i]}

    def peak_of(chosen: Placement) -> int:
        return forecast.peak(rank, schedule, _policy(chosen, forecast, budget.selective))

    def seconds_of(chosen: Placement) -> tuple[float, float]:
        policy = _policy(others | chosen, forecast, budget.selective)
        found = simulated(forecast, policy, budget.times, budget.host_bytes_per_s)
        return found.iteration_s, found.busy_s[rank]

    options = PlacementOptions(segments, copy_s, budget.may_recompute, partial)
    found = choose_placement(options, peak_of, seconds_of, budget.device_bytes)
    if found is not None:
        return found
    offloaded = frozenset(copy_s)
    return Placement(frozenset() if budget.may_recompute else own - offloaded, offloaded)


def _fits(forecast: Forecast, rank: int, chosen: Placement, budget: Budget) -> bool:
    policy = _policy(chosen, forecast, budget.selective)
    return forecast.peak(rank, forecast.layout.schedule, policy) <= budget.device_bytes


def _policy(
    chosen: Placement, forecast: Forecast, selective: Mapping[int, SelectiveOps]
) -> ActivationPolicy:
    some = {index: selective[index] for index in chosen.selective}
    return ActivationPolicy(chosen.saved | forecast.untrained, some, chosen.offloaded)
