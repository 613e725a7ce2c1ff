"""Degrees with which a job fits that does not fit although everything recomputes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from merak.core.errors import MerakError
from merak.core.gradients import is_low_precision
from merak.graph.tensor_parallel.apply import tensor_parallel
from merak.graph.tensor_parallel.features import given_plan
from merak.plan.activation_policy import ActivationPolicy
from merak.plan.activations.forecast import Forecast
from merak.plan.constraints import (
    problem_of,
    reductions_of,
    refuse_optional_layers,
    refuse_tied_copies,
)

_MOST_DOUBLINGS = 3
"""A tensor parallel degree is looked for up to eight times the present one."""


def find_fitting_degrees(forecast: Forecast, budget: int) -> list[str]:
    """The smallest larger tp, and the smallest higher ZeRO stage, with which every pp rank fits.

    Args:
        forecast: the job as it is laid out; with every candidate all segments recompute.
        budget: bytes that a rank may hold.

    Returns:
        Such as `tp=2` and `zero=1`.
    """
    found = []
    for name, candidates in (("tp", _larger_tp(forecast)), ("zero", _higher_zero(forecast))):
        for value, bigger in candidates:
            ranks = bigger.ranks(bigger.layout.schedule, ActivationPolicy())
            if max(rank.peak.total_bytes for rank in ranks) <= budget:
                found.append(f"{name}={value}")
                break
    return found


def _larger_tp(forecast: Forecast) -> Iterator[tuple[int, Forecast]]:
    """The job with larger tensor parallel degrees."""
    mesh, options, graph = forecast.mesh, forecast.options, forecast.layout.graph
    features = given_plan(forecast.model) if options.features is None else options.features
    for doublings in range(1, _MOST_DOUBLINGS + 1):
        tp = mesh.tp * 2**doublings
        try:
            larger = replace(mesh, tp=tp, ep=tp if mesh.ep > 1 else 1)
            rewrite = tensor_parallel(
                graph, features, tp, sequence=options.sequence_parallel, ep=larger.ep
            )
        except MerakError:
            return  # the model does not divide so often
        yield tp, replace(forecast, mesh=larger, rewrite=rewrite)


def _higher_zero(forecast: Forecast) -> Iterator[tuple[int, Forecast]]:
    """The job with higher ZeRO stages."""
    options, layout, mesh = forecast.options, forecast.layout, forecast.mesh
    low = any(is_low_precision(p) and p.requires_grad for p in forecast.model.parameters())
    for zero in range(options.zero + 1, 4 if mesh.replicas > 1 else 0):
        if problem_of(reductions_of(layout.schedule, replace(options, zero=zero), mesh)):
            return
        try:
            refuse_tied_copies(layout, zero)
            refuse_optional_layers(layout, zero, mesh)
        except MerakError:
            return
        if zero == 3 and low and not options.master_weights:
            return
        yield zero, replace(forecast, options=replace(options, zero=zero))
