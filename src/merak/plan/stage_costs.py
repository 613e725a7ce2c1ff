"""Costs of a job's stages, for schedules that are made for given times and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from merak.core.errors import ScheduleError
from merak.core.rank0 import decide_on_rank0
from merak.plan.activations.decide import common_budget
from merak.plan.activations.forecast import Forecast
from merak.plan.activations.offload import NOTHING, parse_offload
from merak.plan.activations.offload_spec import Times
from merak.plan.balance import Timed
from merak.plan.recompute_spec import Mode, parse_recompute
from merak.plan.step_plans import StepPlans
from merak.schedule.costs import Costs, stage_costs


@dataclass(frozen=True, slots=True)
class _Request:
    """Costs and memory limit that a schedule is made for.

    Args:
        costs: of the stages.
        limit_bytes: bytes that a rank may hold of those that the costs count; None for no limit.
    """

    costs: Costs
    limit_bytes: float | None


def plans_from_costs(forecast: Forecast, times: Times) -> StepPlans:
    """The schedule that is made for the costs of the job's own stages; collective.

    Args:
        forecast: the job, laid out under a schedule for equal stages.
        times: of the segments, estimated or measured.
    """
    mesh, options = forecast.mesh, forecast.options
    spec = parse_recompute(options.recompute)
    # Recomputation by the user's option, or to fill the memory, is decided afterwards.
    is_free = spec.mode is Mode.SCHEDULE and parse_offload(options.offload_activations) == NOTHING
    budget = common_budget(options, mesh) if is_free else None
    request = decide_on_rank0(
        mesh, "the costs of stages", lambda: _request(forecast, times(), budget)
    )
    chosen: dict[str, Any] = {"costs": request.costs}
    if not is_free:
        everything = spec.mode is Mode.SELECTIVE or spec.fraction == 1.0
        flags = (everything,) * request.costs.num_stages
        return _made(forecast, {**chosen, "recompute": flags})
    if request.limit_bytes is None:
        return _made(forecast, chosen)
    try:
        return _made(forecast, {**chosen, "memory_limit_bytes": request.limit_bytes})
    except ScheduleError:
        return _made(forecast, chosen)  # `resolve_activations` says what would fit


def _made(forecast: Forecast, chosen: Mapping[str, Any]) -> StepPlans:
    options = forecast.options
    chosen = {**chosen, **(options.schedule_options or {})}
    return StepPlans(options.schedule, forecast.mesh.pp, options.num_microbatches, chosen=chosen)


def _request(forecast: Forecast, times: Sequence[Timed], budget: int | None) -> _Request:
    costs = stage_costs(
        _summed(forecast, times, "forward_s"), _summed(forecast, times, "backward_s")
    )
    if budget is None:
        return _Request(costs, None)
    try:
        return _with_memory(forecast, costs, budget)
    except Exception:
        # Code of the model's own may read values, which fake tensors do not have;
        # `resolve_activations` says so.
        return _Request(costs, None)


def _with_memory(forecast: Forecast, costs: Costs, budget: int) -> _Request:
    """Costs with the bytes of the stages, and the memory limit for them."""
    layout = forecast.layout
    held, values = forecast.saved_bytes(), layout.graph.values
    inputs = {s.index: sum(values[n].num_bytes for n in s.inputs) for s in layout.graph.segments}
    stages = layout.partition.stages
    activations = tuple(float(sum(held[i] for i in own)) for own in stages)
    checkpoints = tuple(float(sum(inputs[i] for i in own)) for own in stages)
    ranks = forecast.ranks(layout.schedule)
    states = {s.stage: s.total - s.activations for rank in ranks for s in rank.stages}
    # Buffers, columns, and temporaries of operators and the optimizer.
    others = max(r.peak.total_bytes - sum(stage.total for stage in r.stages) for r in ranks)
    counted = replace(
        costs,
        activation_bytes=activations,
        weight_gradient_bytes=activations,
        checkpoint_bytes=tuple(map(min, checkpoints, activations)),
        state_bytes=tuple(float(states[stage]) for stage in range(len(stages))),
    )
    return _Request(counted, budget - max(others, 0))


def _summed(forecast: Forecast, times: Sequence[Timed], field: str) -> tuple[float, ...]:
    """Sum of a time over the segments of every stage."""
    stages = forecast.layout.partition.stages
    return tuple(sum(getattr(times[i], field) for i in own) for own in stages)
