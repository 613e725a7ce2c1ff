"""The segments whose activations are offloaded by the user's `offload_activations`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from merak.core.errors import PlanError
from merak.plan.activations.forecast import Forecast
from merak.plan.activations.offload import ARGUMENT, NOTHING, listed, offload_fraction
from merak.plan.balance import Timed
from merak.plan.recompute_spec import Mode, RecomputeSpec

Times = Callable[[], Sequence[Timed]]
"""Function that returns the times of the segments, which may have to be measured first."""


def resolve_offload(
    forecast: Forecast,
    spec: RecomputeSpec,
    saved: frozenset[int],
    times: Times,
    strict: bool = True,
) -> frozenset[int]:
    """Segments whose activations are offloaded, as the user's argument names them.

    Args:
        forecast: the job as it is laid out.
        spec: the argument, parsed; of any mode but `AUTO`.
        saved: segments that save their activations.
        times: of the segments.
        strict: refuse segments that recompute; else leave them out.

    Raises:
        PlanError: a listed segment does not exist or recomputes, or no segment saves activations.
    """
    trained = saved - forecast.untrained
    if spec == NOTHING:
        return frozenset()
    if strict:
        require_saved(forecast, saved)
    if spec.mode is Mode.SEGMENTS:
        names = [segment.name for segment in forecast.layout.graph.segments]
        every = frozenset(range(len(names)))
        return listed(spec, names, saved | forecast.untrained if strict else every) & trained
    if spec.fraction == 1.0:
        return trained
    partition = forecast.layout.partition
    return offload_fraction(partition, trained, times(), forecast.offload_bytes(), spec.fraction)


def require_saved(forecast: Forecast, saved: frozenset[int]) -> None:
    """Refuse to offload activations where no segment saves any.

    Args:
        forecast: the job as it is laid out.
        saved: segments that save their activations.

    Raises:
        PlanError: none of them has any.
    """
    if saved - forecast.untrained:
        return
    options = forecast.options
    raise PlanError(
        f"{ARGUMENT}={options.offload_activations!r} offloads saved activations, but every "
        f"segment recomputes (recompute={options.recompute!r}, schedule={options.schedule!r}); set "
        f"recompute='off' or a fraction of it, or leave {ARGUMENT} out."
    )
