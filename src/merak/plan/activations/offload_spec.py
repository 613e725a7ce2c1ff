"""Which activations wait in host memory: as the user says, or as the memory makes needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from merak.core.errors import PlanError
from merak.plan.activations.forecast import Forecast
from merak.plan.activations.offload import ARGUMENT, NOTHING, listed, offload_share
from merak.plan.balance import Timed
from merak.plan.recompute_spec import Mode, RecomputeSpec

Times = Callable[[], Sequence[Timed]]
"""Gives the times of the segments, which may have to be measured."""


def said(
    forecast: Forecast, wish: RecomputeSpec, kept: frozenset[int], times: Times, strict: bool = True
) -> frozenset[int]:
    """Of the segments that keep their activations, those that a user wants in host memory.

    Args:
        forecast: the job as it is laid out.
        wish: what the user says.
        kept: segments that keep their activations.
        times: of the segments.
        strict: refuse what recomputes; else leave it out.

    Raises:
        PlanError: a listed segment does not exist or recomputes, or no segment keeps anything.
    """
    trained = kept - forecast.untrained
    if wish == NOTHING:
        return frozenset()
    if strict:
        refuse_nothing(forecast, kept)
    if wish.mode is Mode.SEGMENTS:
        names = [segment.name for segment in forecast.layout.graph.segments]
        every = frozenset(range(len(names)))
        return listed(wish, names, kept | forecast.untrained if strict else every) & trained
    if wish.share == 1.0:
        return trained
    partition = forecast.layout.partition
    return offload_share(partition, trained, times(), forecast.moved_bytes(), wish.share)


def refuse_nothing(forecast: Forecast, kept: frozenset[int]) -> None:
    """Refuse to move activations where none are kept.

    Args:
        forecast: the job as it is laid out.
        kept: segments that keep their activations.

    Raises:
        PlanError: none of them has any.
    """
    if kept - forecast.untrained:
        return
    options = forecast.options
    raise PlanError(
        f"{ARGUMENT}={options.offload_activations!r} moves activations that are kept, but every "
        f"segment recomputes (recompute={options.recompute!r}, schedule={options.schedule!r}); set "
        f"recompute='off' or a share of it, or leave {ARGUMENT} out."
    )
