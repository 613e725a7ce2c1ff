"""Where the memory is too small: which segments recompute, and which wait in host memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from merak.plan.activations.forecast import Forecast
from merak.plan.activations.offload_time import Estimate, Work, estimate
from merak.plan.activations.placement import Options, Whereabouts, choose
from merak.plan.balance import Timed
from merak.plan.cost.measured_times import SegmentTimes
from merak.plan.cost.selective_ops import Dear
from merak.plan.memory.model import Keeping


@dataclass(frozen=True, slots=True)
class Means:
    """What a choice rests on.

    Args:
        budget: bytes that a rank may hold.
        times: of the segments.
        host_bytes_per_s: of a rank's way to host memory, each way while both are used.
        dear: by segment, the operators worth keeping where it recomputes.
        may_recompute: whether segments may recompute that would keep their activations.
    """

    budget: int
    times: Sequence[Timed]
    host_bytes_per_s: float
    dear: Mapping[int, Dear]
    may_recompute: bool


def fit(forecast: Forecast, kept: frozenset[int], means: Means) -> Keeping:
    """Let kept activations wait in host memory or be computed again, so that every rank fits.

    Positions are settled one after another, each so that the simulated iteration is as short as it
    can be. Where one does not fit at all, nothing of it stays on the device.

    Args:
        forecast: the job as it is laid out.
        kept: segments that keep their activations, or may.
        means: what the choice rests on.
    """
    trained = kept - forecast.untrained
    settled = Whereabouts(here=trained)
    for rank in range(forecast.mesh.pp):
        own = trained & frozenset(forecast.segments_of(rank))
        others = _limited(settled, trained - own)
        # What another position of the same stages has settled may do here, too.
        known = _limited(settled, own)
        if rank and known.host | (own - known.kept) and _fits(forecast, rank, known, means):
            continue
        settled = _together(others, _settle(forecast, rank, (others, own), means))
    return _keeping(settled, forecast, means.dear)


def simulated(
    forecast: Forecast, keeping: Keeping, times: Sequence[Timed], host_bytes_per_s: float
) -> Estimate:
    """What an iteration takes, with copies to host memory in its way.

    Args:
        forecast: the job as it is laid out.
        keeping: what is done with activations.
        times: of the segments.
        host_bytes_per_s: of a rank's way to host memory, each way while both are used.
    """
    layout, tp = forecast.layout, forecast.mesh.tp
    moved = forecast.moved_bytes()
    every = range(layout.partition.num_segments)
    partly = keeping.partly
    again = {
        i: 1.0 - (partly[i].saved_share if i in partly else 0.0)
        for i in every
        if i not in keeping.kept and i not in forecast.untrained
    }
    work = Work(
        layout.partition,
        # Times are of whole segments, and bytes those of a rank's share.
        [SegmentTimes("", time.forward_s / tp, time.backward_s / tp) for time in times],
        again,
        {i: moved[i] for i in keeping.offloaded if moved[i]},
        host_bytes_per_s,
    )
    return estimate(forecast.recomputing(layout.schedule, keeping.kept), work)


def _settle(
    forecast: Forecast, rank: int, place: tuple[Whereabouts, frozenset[int]], means: Means
) -> Whereabouts:
    others, own = place
    schedule, moved = forecast.layout.schedule, forecast.moved_bytes()
    position, parts = forecast.choices(rank, schedule, means.times, means.dear, own)
    copy_s = {i: 2 * moved[i] / means.host_bytes_per_s for i in own if moved[i]}

    def peak_of(chosen: Whereabouts) -> int:
        return forecast.peak(rank, schedule, _keeping(chosen, forecast, means.dear))

    def seconds_of(chosen: Whereabouts) -> tuple[float, float]:
        keeping = _keeping(_together(others, chosen), forecast, means.dear)
        found = simulated(forecast, keeping, means.times, means.host_bytes_per_s)
        return found.iteration_s, found.busy_s[rank]

    options = Options(position, copy_s, means.may_recompute, parts)
    found = choose(options, peak_of, seconds_of, means.budget)
    if found is not None:
        return found
    host = frozenset(copy_s)
    return Whereabouts(frozenset() if means.may_recompute else own - host, host)


def _fits(forecast: Forecast, rank: int, chosen: Whereabouts, means: Means) -> bool:
    keeping = _keeping(chosen, forecast, means.dear)
    return forecast.peak(rank, forecast.layout.schedule, keeping) <= means.budget


def _keeping(chosen: Whereabouts, forecast: Forecast, dear: Mapping[int, Dear]) -> Keeping:
    partly = {index: dear[index] for index in chosen.partly}
    return Keeping(chosen.kept | forecast.untrained, partly, chosen.host)


def _limited(chosen: Whereabouts, segments: frozenset[int]) -> Whereabouts:
    return Whereabouts(chosen.here & segments, chosen.host & segments, chosen.partly & segments)


def _together(one: Whereabouts, other: Whereabouts) -> Whereabouts:
    return Whereabouts(one.here | other.here, one.host | other.host, one.partly | other.partly)
