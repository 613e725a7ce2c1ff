"""Expected times of a job's segments and stages, and of its step's computation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from merak.plan.activations.forecast import Forecast
from merak.plan.activations.recompute import Recomputable
from merak.plan.balance import Timed
from merak.plan.cost.device import DeviceProfile
from merak.plan.cost.kernels.by_rules import segment_costs
from merak.plan.cost.measured_times import load_times
from merak.schedule.costs import stage_costs
from merak.schedule.simulator.simulate import simulate


@dataclass(frozen=True, slots=True)
class ExpectedTimes:
    """Expected times of one rank's share of the computation; transfers and reductions are apart.

    Args:
        segments: of every segment, for one microbatch.
        recompute_s: of every stage, what it recomputes for one microbatch.
        pipeline_s: from the first forward of a step to its last backward.
    """

    segments: tuple[Timed, ...]
    recompute_s: tuple[float, ...]
    pipeline_s: float


def expected_times(forecast: Forecast, profile: DeviceProfile | None) -> ExpectedTimes | None:
    """Times that a job is expected to take; None where no speed of its device is known.

    Args:
        forecast: of the job.
        profile: known speeds of a rank's device; None for none.
    """
    times = _segments(forecast, profile)
    if times is None:
        return None
    layout = forecast.layout
    stages = layout.partition.stages
    recompute_s = _recompute(forecast, times)
    costs = stage_costs(
        tuple(sum(times[i].forward_s for i in own) for own in stages),
        tuple(sum(times[i].backward_s for i in own) for own in stages),
        recompute_s=recompute_s,
    )
    return ExpectedTimes(tuple(times), recompute_s, simulate(layout.schedule, costs).makespan)


def _segments(forecast: Forecast, profile: DeviceProfile | None) -> Sequence[Recomputable] | None:
    """Times of the segments as a tensor parallel rank runs them: the user's own, or estimated."""
    layout, options = forecast.layout, forecast.options
    if options.segment_times is not None:
        names = [segment.name for segment in layout.graph.segments]
        return forecast.timed(load_times(Path(options.segment_times), names), profile)
    if profile is None:
        return None
    return forecast.timed(segment_costs(forecast.local_model.segments, profile), profile)


def _recompute(forecast: Forecast, times: Sequence[Recomputable]) -> tuple[float, ...]:
    policy = forecast.policy
    return tuple(
        sum(
            forecast.recompute_s(times, i, policy.selective.get(i))
            for i in own
            if i not in policy.saved
        )
        for own in forecast.layout.partition.stages
    )
