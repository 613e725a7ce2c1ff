"""What a job's stages cost, for schedules that are made for given times and memory.

Rank 0 decides for all ranks, since estimates rest on speeds that differ from rank to rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from merak.core.errors import ScheduleError
from merak.core.health.status import waiting_for_first
from merak.plan.activations.decide import common_budget
from merak.plan.activations.forecast import Forecast
from merak.plan.activations.offload import NOTHING, parse_offload
from merak.plan.activations.offload_spec import Times
from merak.plan.balance import Timed
from merak.plan.recompute_spec import Mode, parse_recompute
from merak.plan.step_plans import StepPlans
from merak.schedule.costs import Costs, stage_costs


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a schedule is made for.

    Args:
        costs: of the stages.
        limit_bytes: what a position may hold of what the costs count; None for no limit.
    """

    costs: Costs
    limit_bytes: float | None


def plans_from_costs(forecast: Forecast, times: Times) -> StepPlans:
    """The plans of a schedule that is made for the job's own stages; called alike on every rank.

    Args:
        forecast: the job, laid out under a schedule for equal stages.
        times: of the segments, estimated or measured.
    """
    mesh, options = forecast.mesh, forecast.options
    spec = parse_recompute(options.recompute)
    # What recomputes by the user's word, or fills the memory, is settled afterwards.
    is_free = spec.mode is Mode.SCHEDULE and parse_offload(options.offload_activations) == NOTHING
    budget = common_budget(options, mesh) if is_free else None
    asked: list[_Asked | None] = [None]
    if mesh.rank == 0:
        asked = [_asked(forecast, times(), budget)]
    if mesh.device_mesh is not None:
        with waiting_for_first("the costs of stages"):
            dist.broadcast_object_list(asked, src=0)
    assert asked[0] is not None
    chosen: dict[str, Any] = {"costs": asked[0].costs}
    if not is_free:
        everything = spec.mode is Mode.SELECTIVE or spec.fraction == 1.0
        flags = (everything,) * asked[0].costs.num_stages
        return _made(forecast, {**chosen, "recompute": flags})
    if asked[0].limit_bytes is None:
        return _made(forecast, chosen)
    try:
        return _made(forecast, {**chosen, "memory_limit_bytes": asked[0].limit_bytes})
    except ScheduleError:
        return _made(forecast, chosen)  # whoever compares with the memory says what would fit


def _made(forecast: Forecast, chosen: Mapping[str, Any]) -> StepPlans:
    options = forecast.options
    if options.zero == 3:  # which needs whole backwards
        chosen = {**chosen, "split": False}
    return StepPlans(options.schedule, forecast.mesh.pp, options.num_microbatches, chosen=chosen)


def _asked(forecast: Forecast, times: Sequence[Timed], budget: int | None) -> _Asked:
    costs = stage_costs(
        _summed(forecast, times, "forward_s"), _summed(forecast, times, "backward_s")
    )
    if budget is None:
        return _Asked(costs, None)
    try:
        return _with_memory(forecast, costs, budget)
    except Exception:
        # Code of the model's own may look at numbers, which tensors without them do not have;
        # whoever compares with the memory says so.
        return _Asked(costs, None)


def _with_memory(forecast: Forecast, costs: Costs, budget: int) -> _Asked:
    """Likewise, with what the stages hold, and what is left for that."""
    layout = forecast.layout
    held, values = forecast.saved_bytes(), layout.graph.values
    inputs = {s.index: sum(values[n].num_bytes for n in s.inputs) for s in layout.graph.segments}
    stages = layout.partition.stages
    activations = tuple(float(sum(held[i] for i in own)) for own in stages)
    checkpoints = tuple(float(sum(inputs[i] for i in own)) for own in stages)
    ranks = forecast.ranks(layout.schedule)
    states = {s.stage: s.total - s.activations for rank in ranks for s in rank.stages}
    # Buffers, columns, and what an operator or the optimizer takes for a while.
    others = max(r.peak.total_bytes - sum(stage.total for stage in r.stages) for r in ranks)
    counted = replace(
        costs,
        activation_bytes=activations,
        weight_gradient_bytes=activations,
        checkpoint_bytes=tuple(map(min, checkpoints, activations)),
        state_bytes=tuple(float(states[stage]) for stage in range(len(stages))),
    )
    return _Asked(counted, budget - max(others, 0))


def _summed(forecast: Forecast, times: Sequence[Timed], field: str) -> tuple[float, ...]:
    """A time of every stage's segments together."""
    stages = forecast.layout.partition.stages
    return tuple(sum(getattr(times[i], field) for i in own) for own in stages)
