"""What a job recomputes or offloads: said, or chosen to fit the memory; and whether it fits.

Rank 0 decides for all ranks, since estimates rest on speeds that differ from rank to rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from merak.core.errors import PlanError
from merak.core.health.status import waiting_for_all, waiting_for_first
from merak.core.mesh import Mesh
from merak.plan.activations.fit import Means, fit
from merak.plan.activations.forecast import Forecast
from merak.plan.activations.offload import ARGUMENT, NOTHING, parse_offload
from merak.plan.activations.offload_spec import Times, refuse_nothing, said
from merak.plan.activations.recompute import keep_share, recomputing_stages
from merak.plan.activations.suggest_degrees import others_that_fit
from merak.plan.balance import balance
from merak.plan.cost.device import DeviceProfile
from merak.plan.cost.selective_ops import Dear
from merak.plan.layout import EngineOptions
from merak.plan.memory.model import Keeping, RankMemory
from merak.plan.recompute_spec import Mode, Recompute, RecomputeSpec, parse_recompute
from merak.plan.step_plans import StepPlans

_SHARE_TO_FILL = 0.92
"""What `auto` takes of a GPU's memory; the rest is for its context, libraries and fragments."""

logger = logging.getLogger(__name__)

Profile = Callable[[], DeviceProfile]
"""Gives the speeds of the devices, likewise."""


@dataclass(frozen=True, slots=True)
class _Decided:
    """What rank 0 has decided.

    Args:
        kept: segments that keep their activations.
        partly: by segment of the others, the operators whose results it keeps.
        offloaded: of those that keep their activations, those that do so in host memory.
        problem: why the job cannot be run.
    """

    kept: frozenset[int] = frozenset()
    partly: Mapping[int, Dear] = field(default_factory=dict)
    offloaded: frozenset[int] = frozenset()
    problem: str | None = None


def settle_recompute(forecast: Forecast, times: Times, profile: Profile) -> Forecast:
    """Decide what recomputes or offloads, and refuse what does not fit; alike on every rank.

    Args:
        forecast: the job as it is laid out, and what the user said about activations and memory.
        times: of the segments.
        profile: of the devices.

    Returns:
        The job, with what keeps its activations and a schedule to match.

    Raises:
        PlanError: a choice that makes no sense, or a memory that the job does not fit.
    """
    layout, mesh, options = forecast.layout, forecast.mesh, forecast.options
    wish, away = parse_recompute(options.recompute), parse_offload(options.offload_activations)
    budgets = _on_all_ranks(_budget(options, mesh), mesh)
    known = [budget for budget in budgets if budget is not None]
    leaves_all = wish.mode is Mode.SCHEDULE and away == NOTHING
    if leaves_all and not known:
        return forecast
    decided = [_Decided()]
    if mesh.rank == 0:
        budget = min(known, default=None)
        try:
            chosen = _choose(forecast, wish, times, profile, budget)
            problem = _misfit(forecast, chosen, budget, times)
            decided = [_Decided(chosen.kept, chosen.partly, chosen.offloaded, problem)]
        except PlanError as error:
            decided = [_Decided(problem=str(error))]
        except Exception as error:
            # Code of the model's own may look at numbers, which tensors without them do not have.
            problem = _unforeseen(error, not leaves_all or options.memory_budget is not None)
            decided = [_Decided(problem=problem)]
    if mesh.device_mesh is not None:
        with waiting_for_first("what is recomputed"):
            dist.broadcast_object_list(decided, src=0)
    found = decided[0]
    if found.problem is not None:
        raise PlanError(found.problem)
    if leaves_all:
        return forecast
    plans = layout.plans.recomputing(recomputing_stages(layout.partition, found.kept))
    layout = replace(
        layout, plans=plans, kept=found.kept, partly=found.partly, offloaded=found.offloaded
    )
    return replace(forecast, layout=layout)


def may_change(recompute: Recompute) -> bool:
    """Whether what recomputes may change while the job runs, since it was chosen for the user."""
    return parse_recompute(recompute).mode is Mode.AUTO


def _unforeseen(error: Exception, was_asked_for: bool) -> str | None:
    """What to say when segments do not run on tensors without numbers: a refusal, if need be."""
    what = f"the memory of this model cannot be foreseen ({type(error).__name__}: {error})"
    if was_asked_for:
        return f"{what}; leave memory_budget unset, and recompute 'off', 'full' or a list."
    logger.warning("%s; it is not compared with the device's.", what)
    return None


def _budget(options: EngineOptions, mesh: Mesh) -> int | None:
    """What this rank may hold: as the user says, or its GPU's memory."""
    if options.memory_budget is not None:
        return options.memory_budget
    if mesh.device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(mesh.device).total_memory)


def common_budget(options: EngineOptions, mesh: Mesh) -> int | None:
    """What every rank may hold, with room for what nobody foresees; None if nobody knows."""
    known = [budget for budget in _on_all_ranks(_budget(options, mesh), mesh) if budget is not None]
    least = min(known, default=None)
    if least is None or options.memory_budget is not None:
        return least
    return int(_SHARE_TO_FILL * least)


def _on_all_ranks(budget: int | None, mesh: Mesh) -> list[int | None]:
    found: list[int | None] = [budget] * mesh.world_size
    if mesh.device_mesh is not None:
        with waiting_for_all("the memory of"):
            dist.all_gather_object(found, budget)
    return found


def _choose(
    forecast: Forecast, wish: RecomputeSpec, times: Times, profile: Profile, budget: int | None
) -> Keeping:
    """What is done with activations."""
    away = parse_offload(forecast.options.offload_activations)
    if away.mode is Mode.AUTO:
        return _fitted(forecast, wish, times, profile, _to_fill(forecast, ARGUMENT, budget))
    kept, partly = frozenset[int](), dict[int, Dear]()
    if wish.mode is Mode.SELECTIVE:
        partly = forecast.memory.find_dear(profile())
    elif wish.mode is Mode.AUTO:
        fill = _to_fill(forecast, "recompute", budget)
        kept, partly = _filled(forecast, away, times, dear_operators(forecast, profile), fill)
    else:
        kept = _said(forecast, wish, times)
    kept |= forecast.untrained
    strict = wish.mode is not Mode.AUTO
    return Keeping(kept, partly, said(forecast, away, kept, times, strict))


def _to_fill(forecast: Forecast, argument: str, budget: int | None) -> int:
    """The bytes that a choice for the user may fill."""
    if budget is None:
        raise PlanError(
            f"{argument}='auto' fills a memory whose size is not known on the CPU; give "
            "memory_budget in bytes."
        )
    given = forecast.options.memory_budget is not None
    return budget if given else int(_SHARE_TO_FILL * budget)


def _fitted(
    forecast: Forecast, wish: RecomputeSpec, times: Times, profile: Profile, budget: int
) -> Keeping:
    """What fits with the shortest iteration, of recomputing and of waiting in host memory."""
    is_free = wish.mode is Mode.AUTO
    kept = frozenset(range(forecast.layout.partition.num_segments))
    if wish.mode is Mode.SELECTIVE:
        kept = frozenset()
    elif not is_free:
        kept = _said(forecast, wish, times)
    refuse_nothing(forecast, kept)
    given = forecast.options.host_bytes_per_s
    means = Means(
        budget,
        times(),
        profile().host_bytes_per_s if given is None else given,
        dear_operators(forecast, profile) if is_free else {},
        is_free,
    )
    return fit(forecast, kept, means)


def _filled(
    forecast: Forecast, away: RecomputeSpec, times: Times, dear: Mapping[int, Dear], budget: int
) -> tuple[frozenset[int], dict[int, Dear]]:
    """As many kept segments, and operators of others, as the memory allows."""
    kept, partly = frozenset[int](), frozenset[int]()
    for rank in range(forecast.mesh.pp):
        whole, some = forecast.fill_one(
            rank,
            forecast.layout.schedule,
            times(),
            budget,
            dear,
            lambda chosen: said(forecast, away, chosen, times, strict=False),
        )
        kept, partly = kept | whole, partly | some
    return kept, {index: dear[index] for index in partly - kept}


def dear_operators(forecast: Forecast, profile: Profile) -> Mapping[int, Dear]:
    """By segment, the operators that `auto` may keep; halves of microbatches keep none."""
    if forecast.mesh.tp > 1 and forecast.options.sub_pipelining != "off":
        return {}
    return forecast.memory.find_dear(profile())


def _said(forecast: Forecast, wish: RecomputeSpec, times: Times) -> frozenset[int]:
    """The segments that keep their activations, as the user has said."""
    layout = forecast.layout
    every = frozenset(range(layout.partition.num_segments))
    if wish.mode is Mode.SCHEDULE:
        return forecast.kept
    if wish.mode is Mode.SEGMENTS:
        return every - wish.numbers([segment.name for segment in layout.graph.segments])
    if wish.mode is Mode.SHARE:
        if wish.share in (0.0, 1.0):
            return every if wish.share == 0.0 else frozenset()
        held = forecast.held_bytes()
        return keep_share(layout.partition, times(), [held[i] for i in sorted(held)], wish.share)
    raise AssertionError(f"{wish.mode} is chosen elsewhere")


def _misfit(forecast: Forecast, keeping: Keeping, budget: int | None, times: Times) -> str | None:
    """A sentence, if some rank does not fit: the numbers, and what would fit."""
    if budget is None:
        return None
    schedule = forecast.layout.schedule
    worst = _largest(forecast.ranks(schedule, keeping.kept, keeping.partly, keeping.offloaded))
    if worst.peak.total_bytes <= budget:
        return None
    parts = ", ".join(f"{p.value} {gigabytes(b)}" for p, b in worst.peak.parts.items() if b)
    sentence = (
        f"pipeline position {worst.rank} needs {gigabytes(worst.peak.total_bytes)} at "
        f"{worst.peak.at} ({parts}), but may hold {gigabytes(budget)}"
    )
    least = _largest(forecast.ranks(schedule, frozenset(), {})).peak.total_bytes
    fixes = [f"recompute='full' needs {gigabytes(least)}"] if least <= budget else []
    fixes += _offload_that_fits(forecast, keeping, budget)
    if fixes:
        which = "that" if len(fixes) == 1 else "one of them"
        return f"{sentence}; {' and '.join(fixes)}, so use {which} or 'auto'."
    fix = _fix(forecast, budget, times)
    return f"{sentence}, and {gigabytes(least)} if everything recomputes; {fix}."


def _fix(forecast: Forecast, budget: int, times: Times) -> str:
    """What to change so that a job fits that does not although everything recomputes."""
    fits, others = pp_that_fits(forecast, budget, times), others_that_fit(forecast, budget)
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


def _offload_that_fits(forecast: Forecast, keeping: Keeping, budget: int) -> list[str]:
    """What it takes if all kept activations wait in host memory, where that fits."""
    kept = keeping.kept - forecast.untrained
    if not kept or kept == keeping.offloaded or forecast.options.sub_pipelining == "on":
        return []
    ranks = forecast.ranks(forecast.layout.schedule, keeping.kept, keeping.partly, kept)
    needed, host = _largest(ranks).peak.total_bytes, max(rank.host_bytes for rank in ranks)
    if needed > budget:
        return []
    beside = f"{gigabytes(needed)} with {gigabytes(host)} of host memory"
    return [f"{ARGUMENT}='full' needs {beside}"]


def _largest(ranks: Sequence[RankMemory]) -> RankMemory:
    return max(ranks, key=lambda rank: rank.peak.total_bytes)


def pp_that_fits(forecast: Forecast, budget: int, times: Times) -> int | None:
    """The least larger pipeline degree, by doubling, with which all fits that recomputes."""
    mesh, layout, options = forecast.mesh, forecast.layout, forecast.options
    num_segments, pp = layout.partition.num_segments, 2 * mesh.pp
    while pp <= num_segments:
        try:
            plans = StepPlans(options.schedule, pp, options.num_microbatches)
            num_stages = plans.base.schedule.num_stages
            partition = balance(times(), num_stages, options.num_microbatches)
        except ValueError:
            return None  # The schedule is not defined for that degree.
        bigger = replace(
            forecast,
            layout=replace(layout, partition=partition, plans=plans),
            mesh=replace(mesh, pp=pp),
        )
        ranks = bigger.ranks(plans.base.schedule, frozenset(), {})
        if _largest(ranks).peak.total_bytes <= budget:
            return pp
        pp *= 2
    return None


def gigabytes(num_bytes: int) -> str:
    """A size for people to read."""
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes / 1e3:.1f} kB"
