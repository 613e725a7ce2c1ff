"""Decision on a job's activations: the policy that was requested, or one that fits the memory.

Rank 0 decides for all ranks, since estimates rest on speeds that differ from rank to rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from merak.core.errors import DoesNotFitError, PlanError
from merak.core.health.status import waiting_for_all
from merak.core.mesh import Mesh
from merak.core.rank0 import decide_on_rank0
from merak.core.units import size
from merak.plan.activation_policy import ActivationPolicy
from merak.plan.activations.fit import Budget, fit_activations
from merak.plan.activations.forecast import Forecast
from merak.plan.activations.offload import ARGUMENT, NOTHING, parse_offload
from merak.plan.activations.offload_spec import Times, require_saved, resolve_offload
from merak.plan.activations.recompute import Recomputable, recomputing_stages, save_fraction
from merak.plan.activations.suggest_degrees import find_fitting_degrees
from merak.plan.balance import balance
from merak.plan.cost.device import DeviceProfile
from merak.plan.cost.selective_ops import SelectiveOps
from merak.plan.engine_options import EngineOptions
from merak.plan.memory.model import RankMemory
from merak.plan.memory.non_tensor import usable_bytes
from merak.plan.partition import Partition, move_to_fit
from merak.plan.recompute_spec import (
    Mode,
    Recompute,
    RecomputeSpec,
    parse_recompute,
    recomputing_times,
)
from merak.plan.step_plans import StepPlans

logger = logging.getLogger(__name__)

Profile = Callable[[], DeviceProfile]
"""Function that returns the speeds of the devices, which may have to be measured first."""

RecomputableTimes = Callable[[], Sequence[Recomputable]]
"""Function that returns the times of all segments, with those of their recomputations."""


def resolve_activations(forecast: Forecast, times: Times, profile: Profile) -> Forecast:
    """Resolve the options on activations to a policy that fits; collective, the same everywhere.

    Args:
        forecast: the job as it is laid out, with the user's options.
        times: of the segments.
        profile: of the devices.

    Returns:
        The job, with its activation policy and a schedule to match.

    Raises:
        PlanError: options that contradict each other, or a job that does not fit its memory.
    """
    layout, mesh, options = forecast.layout, forecast.mesh, forecast.options
    spec, offload = parse_recompute(options.recompute), parse_offload(options.offload_activations)
    budgets = _on_all_ranks(_budget(options, mesh), mesh)
    known = [budget for budget in budgets if budget is not None]
    is_default = spec.mode is Mode.SCHEDULE and offload == NOTHING
    if is_default and not known:
        return forecast

    def recomputable() -> Sequence[Recomputable]:
        return forecast.timed(times(), profile())

    def decide() -> ActivationPolicy:
        budget = min(known, default=None)
        policy = None
        try:
            policy = choose_policy(forecast, spec, recomputable, profile, budget)
            _refuse_misfit(forecast, policy, budget, times)
        except PlanError:
            raise
        except Exception as error:
            # Code of the model's own may read values, which fake tensors do not have.
            needs_it = policy is None and not is_default
            _report_no_forecast(error, needs_it or options.memory_budget is not None)
        return policy if policy is not None else forecast.policy

    policy = decide_on_rank0(mesh, "the activations to recompute", decide)
    if is_default:
        return forecast
    plans = layout.plans.recomputing(recomputing_stages(layout.partition, policy.saved))
    return replace(forecast, layout=replace(layout, plans=plans, activations=policy))


def may_replan(recompute: Recompute) -> bool:
    """Whether the activation policy may change while the job runs, since "auto" chose it."""
    return parse_recompute(recompute).mode is Mode.AUTO


def _report_no_forecast(error: Exception, requested: bool) -> None:
    """Refuse, or warn about, a model whose segments do not run on fake tensors."""
    what = f"the memory of this model cannot be forecast ({type(error).__name__}: {error})"
    if requested:
        raise PlanError(
            f"{what}; leave memory_budget unset, and recompute 'off', 'full' or a list."
        ) from error
    logger.warning("%s; it is not compared with the device's.", what)


def _budget(options: EngineOptions, mesh: Mesh) -> int | None:
    """Bytes that this rank may hold: the user's limit, or its GPU's memory; None on the CPU."""
    if options.memory_budget is not None:
        return options.memory_budget
    if options.device_profile is not None and options.device_profile.memory_bytes is not None:
        return options.device_profile.memory_bytes
    if mesh.device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(mesh.device).total_memory)


def common_budget(options: EngineOptions, mesh: Mesh) -> int | None:
    """Bytes that every rank may fill, the smallest rank's; None where no rank knows its memory."""
    known = [budget for budget in _on_all_ranks(_budget(options, mesh), mesh) if budget is not None]
    least = min(known, default=None)
    if least is None or options.memory_budget is not None:
        return least
    return _for_tensors(least, options, mesh)


def _for_tensors(memory_bytes: int, options: EngineOptions, mesh: Mesh) -> int:
    """Bytes of a device's memory that tensors of this job may fill."""
    profile = options.device_profile
    measured = None if profile is None else profile.communicator_bytes
    return usable_bytes(memory_bytes, mesh, measured)


def _on_all_ranks(budget: int | None, mesh: Mesh) -> list[int | None]:
    found: list[int | None] = [budget] * mesh.world_size
    if mesh.device_mesh is not None:
        with waiting_for_all("the memory of"):
            dist.all_gather_object(found, budget)
    return found


def choose_policy(
    forecast: Forecast,
    spec: RecomputeSpec,
    times: RecomputableTimes,
    profile: Profile,
    budget: int | None,
) -> ActivationPolicy:
    """The activation policy by the options `recompute` and `offload_activations`."""
    offload = parse_offload(forecast.options.offload_activations)
    if offload.mode is Mode.AUTO:
        fill = _to_fill(forecast, ARGUMENT, budget)
        return _with_auto_offload(forecast, spec, times, profile, fill)
    saved, selective = frozenset[int](), dict[int, SelectiveOps]()
    if spec.mode is Mode.SELECTIVE:
        selective = forecast.memory.find_selective_ops(profile())
    elif spec.mode is Mode.AUTO:
        fill = _to_fill(forecast, "recompute", budget)
        candidates = selective_operators(forecast, profile)
        saved, selective = _filled(forecast, offload, times, candidates, fill)
    else:
        saved = _resolve_saved(forecast, spec, times)
    saved |= forecast.untrained
    strict = spec.mode is not Mode.AUTO
    offloaded = resolve_offload(forecast, offload, saved, times, strict)
    return ActivationPolicy(saved, selective, offloaded)


def _to_fill(forecast: Forecast, argument: str, budget: int | None) -> int:
    """Bytes that `auto` may fill."""
    if budget is None:
        raise PlanError(
            f"{argument}='auto' fills a memory whose size is not known on the CPU; give "
            "memory_budget in bytes."
        )
    given = forecast.options.memory_budget is not None
    return budget if given else _for_tensors(budget, forecast.options, forecast.mesh)


def _with_auto_offload(
    forecast: Forecast,
    spec: RecomputeSpec,
    times: RecomputableTimes,
    profile: Profile,
    fill: int,
) -> ActivationPolicy:
    """The policy that fits with the shortest iteration, by recomputing and offloading."""
    is_free = spec.mode is Mode.AUTO
    saved = frozenset(range(forecast.layout.partition.num_segments))
    if spec.mode is Mode.SELECTIVE:
        saved = frozenset()
    elif not is_free:
        saved = _resolve_saved(forecast, spec, times)
    require_saved(forecast, saved)
    given = forecast.options.host_bytes_per_s
    budget = Budget(
        fill,
        times(),
        profile().host_bytes_per_s if given is None else given,
        selective_operators(forecast, profile) if is_free else {},
        is_free,
    )
    return fit_activations(forecast, saved, budget)


def _filled(
    forecast: Forecast,
    offload: RecomputeSpec,
    times: RecomputableTimes,
    selective: Mapping[int, SelectiveOps],
    budget: int,
) -> tuple[frozenset[int], dict[int, SelectiveOps]]:
    """Saved segments, and selective operators of others, that fill every rank's memory."""
    saved, partly = frozenset[int](), frozenset[int]()
    for rank in range(forecast.mesh.pp):
        whole, some = forecast.fill_rank(
            rank,
            forecast.layout.schedule,
            times(),
            budget,
            selective,
            lambda chosen: resolve_offload(forecast, offload, chosen, times, strict=False),
        )
        saved, partly = saved | whole, partly | some
    return saved, {index: selective[index] for index in partly - saved}


def selective_operators(forecast: Forecast, profile: Profile) -> Mapping[int, SelectiveOps]:
    """By segment, the operators that `auto` may save; none while sub-pipelining is not decided."""
    if forecast.mesh.tp > 1 and forecast.options.sub_pipelining == "auto":
        return {}
    return forecast.memory.find_selective_ops(profile())


def _resolve_saved(
    forecast: Forecast, spec: RecomputeSpec, times: RecomputableTimes
) -> frozenset[int]:
    """The segments that save their activations by the option `recompute`."""
    layout = forecast.layout
    every = frozenset(range(layout.partition.num_segments))
    if spec.mode is Mode.SCHEDULE:
        return forecast.saved
    if spec.mode is Mode.SEGMENTS:
        return every - spec.numbers([segment.name for segment in layout.graph.segments])
    if spec.mode is Mode.FRACTION:
        if spec.fraction in (0.0, 1.0):
            return every if spec.fraction == 0.0 else frozenset()
        sizes = forecast.saved_bytes()
        in_order = [sizes[i] for i in sorted(sizes)]
        found = times()
        seconds = [forecast.recompute_s(found, index) for index in sorted(sizes)]
        return save_fraction(layout.partition, seconds, in_order, spec.fraction)
    raise AssertionError(f"{spec.mode} is chosen elsewhere")


def _refuse_misfit(
    forecast: Forecast, policy: ActivationPolicy, budget: int | None, times: Times
) -> None:
    """Refuse a job that does not fit, with the numbers and what would fit."""
    if budget is None:
        return
    schedule = forecast.layout.schedule
    worst = _largest(forecast.ranks(schedule, policy))
    if worst.peak.total_bytes <= budget:
        return
    parts = ", ".join(f"{c.value} {size(b, 2)}" for c, b in worst.peak.by_category.items() if b)
    sentence = (
        f"pp rank {worst.rank} needs {size(worst.peak.total_bytes, 2)} at "
        f"{worst.peak.at} ({parts}), but may hold {size(budget, 2)}"
    )
    least = _largest(forecast.ranks(schedule, ActivationPolicy())).peak.total_bytes
    fixes = [f"recompute='full' needs {size(least, 2)}"] if least <= budget else []
    fixes += _offload_that_fits(forecast, policy, budget)
    auto = " or 'auto'" if fixes else ""
    fixes += _partition_that_fits(forecast, policy, budget)
    if fixes:
        which = "that" if len(fixes) == 1 else "one of them"
        raise DoesNotFitError(f"{sentence}; {' and '.join(fixes)}, so use {which}{auto}.")
    fix = _fix(forecast, budget, times)
    raise DoesNotFitError(f"{sentence}, and {size(least, 2)} if everything recomputes; {fix}.")


def _fix(forecast: Forecast, budget: int, times: Times) -> str:
    """Degrees with which a job fits that does not although everything recomputes."""
    fits, others = find_fitting_pp(forecast, budget, times), find_fitting_degrees(forecast, budget)
    most = forecast.layout.partition.num_segments
    if not others:
        fix = (
            f"use pp={fits} with recompute='full', or" if fits else f"no pp up to {most} fits; use"
        )
        return f"{fix} a larger tp or a smaller microbatch"
    either = " or ".join(others)
    if fits:
        return f"use pp={fits} with recompute='full', {either} with it, or a smaller microbatch"
    return f"no pp up to {most} fits; use {either} with recompute='full', or a smaller microbatch"


def _offload_that_fits(forecast: Forecast, policy: ActivationPolicy, budget: int) -> list[str]:
    """The memory of the job with all saved activations offloaded, if that fits."""
    saved = policy.saved - forecast.untrained
    if not saved or saved == policy.offloaded or forecast.options.sub_pipelining == "on":
        return []
    ranks = forecast.ranks(forecast.layout.schedule, replace(policy, offloaded=saved))
    needed, host = _largest(ranks).peak.total_bytes, max(rank.host.total for rank in ranks)
    if needed > budget:
        return []
    beside = f"{size(needed, 2)} with {size(host, 2)} of host memory"
    return [f"{ARGUMENT}='full' needs {beside}"]


def _partition_that_fits(forecast: Forecast, policy: ActivationPolicy, budget: int) -> list[str]:
    """The partition with which all ranks have the memory, if moving few segments is enough."""
    layout, options = forecast.layout, forecast.options
    if options.partition is not None:
        return []
    follows = parse_recompute(options.recompute).mode is Mode.SCHEDULE

    def ranks(partition: Partition) -> tuple[RankMemory, ...]:
        moved = replace(forecast, layout=replace(layout, partition=partition))
        return moved.ranks(layout.schedule, moved.policy if follows else policy)

    def filled(partition: Partition) -> list[float]:
        return [own.peak.total_bytes / budget for own in ranks(partition)]

    found = move_to_fit(layout.partition, layout.schedule, filled)
    if found is None:
        return []
    needed = _largest(ranks(found)).peak.total_bytes
    return [f"partition={list(found.sizes)} needs {size(needed, 2)}"]


def _largest(ranks: Sequence[RankMemory]) -> RankMemory:
    return max(ranks, key=lambda rank: rank.peak.total_bytes)


def find_fitting_pp(forecast: Forecast, budget: int, times: Times) -> int | None:
    """The smallest larger pipeline degree, by doubling, with which a recomputing job fits."""
    mesh, layout, options = forecast.mesh, forecast.layout, forecast.options
    num_segments, pp = layout.partition.num_segments, 2 * mesh.pp
    names = [segment.name for segment in layout.graph.segments]
    while pp <= num_segments:
        try:
            chosen = options.schedule_options or {}
            plans = StepPlans(options.schedule, pp, options.num_microbatches, chosen=chosen)
            num_stages = plans.base.schedule.num_stages
            costs = recomputing_times(times(), names, "full")
            partition = balance(costs, num_stages, options.num_microbatches)
        except ValueError:
            return None  # The schedule is not defined for that degree.
        bigger = replace(
            forecast,
            layout=replace(layout, partition=partition, plans=plans),
            mesh=replace(mesh, pp=pp),
        )
        ranks = bigger.ranks(plans.base.schedule, ActivationPolicy())
        if _largest(ranks).peak.total_bytes <= budget:
            return pp
        pp *= 2
    return None
