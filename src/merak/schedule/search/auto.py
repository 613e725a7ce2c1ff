"""Synthesis of a schedule for given times and memory: `auto`."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from merak.core.errors import ScheduleError
from merak.schedule.builders.common import check_counts, single_pipe
from merak.schedule.catalog import FORMULAS
from merak.schedule.costs import Costs, uniform
from merak.schedule.ir import Schedule
from merak.schedule.list_scheduler import Job, list_schedule
from merak.schedule.search.candidates import (
    Request,
    activation_limits,
    jobs,
    least_limit,
    lower_bound,
    make_job,
    placements,
    policies,
)
from merak.schedule.search.local_search import improve
from merak.schedule.simulator.simulate import Simulation, simulate

_TOLERANCE = 1e-9

_LIST_ACTIONS = 400_000
"""Actions that list scheduling may place in all: a few seconds."""

_SEARCH_ACTIONS = 600_000
"""Actions that local search may simulate in all: less than a second."""

_NUM_STARTS = 3
"""Schedules that local search starts from."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A schedule that fits, with its simulation."""

    simulation: Simulation

    @property
    def key(self) -> tuple[float, float]:
        """Shorter first, then smaller."""
        return self.simulation.makespan, max(self.simulation.peak_memory_bytes)


def auto(
    num_ranks: int,
    num_microbatches: int,
    *,
    costs: Costs | None = None,
    memory_limit_bytes: float = float("inf"),
    split: bool | None = None,
    recompute: Sequence[bool] | None = None,
    max_copies: int = 2,
) -> Schedule:
    """Make a synchronous schedule for given times, transfers and memory.

    It takes the shortest of all formula schedules that fit and of list schedules by several rules,
    then moves actions along the critical path. The search is bounded by counts, not by a clock, and
    so always ends with the same schedule.

    Args:
        num_ranks: pipeline degree P.
        num_microbatches: microbatches per iteration.
        costs: times and sizes of the stages, P of them or a multiple; equal ones unless given.
        memory_limit_bytes: what a rank may hold: weights, as in `costs`, and activations.
        split: whether backwards are split into I and W; whatever is shorter unless given.
        recompute: which stages recompute; whatever is shorter and fits unless given.
        max_copies: most copies of the model over the ranks: GEMS has 2, Chimera 2 or more. Give
            `state_bytes` in the costs, or copies look free.

    Raises:
        ScheduleError: the stages are no multiple of P, or nothing fits the limit.
    """
    check_counts("auto", num_ranks, num_microbatches)
    costs = costs or uniform(num_ranks)
    if costs.num_stages % num_ranks:
        raise ScheduleError(
            f"auto lays the same number of stages on each of {num_ranks} ranks; "
            f"the costs are of {costs.num_stages}. Use a multiple of {num_ranks}."
        )
    flags = None if recompute is None else tuple(recompute)
    request = Request(
        num_ranks, num_microbatches, costs, memory_limit_bytes, split, flags, max_copies
    )
    work = [job for ranks in placements(request) for job in jobs(request, ranks)]
    enough_s = min(map(lower_bound, work))
    best = _best(request, work, enough_s)
    if best is None:
        least = min(least_limit(request, ranks) for ranks in placements(request))
        raise ScheduleError(
            f"No schedule fits a memory limit of {memory_limit_bytes:g}; the least that one fits "
            f"is {least:g}."
        )
    return replace(best.simulation.schedule, name="auto")


def _best(request: Request, work: Sequence[Job], enough_s: float) -> _Candidate | None:
    """The best of formulas, list schedules and local search, tried until one is short enough."""
    found: list[_Candidate] = []
    for source in (_formulas(request), _list_schedules(request, work)):
        found = sorted((*found, *source), key=lambda c: c.key)
        if found and found[0].simulation.makespan <= enough_s + _TOLERANCE:
            return found[0]
    improved = [_improved(request, candidate) for candidate in found[:_NUM_STARTS]]
    return min(improved, key=lambda c: c.key, default=None)


def _formulas(request: Request) -> Iterator[_Candidate]:
    """Every synchronous formula with every option that fits the request."""
    counts, stages = (request.num_ranks, request.num_microbatches), request.costs.num_stages
    for own in FORMULAS.values():
        for options in _option_choices(own.build, request):
            try:
                if own.formula and own.formula(*counts, **options).num_stages != stages:
                    continue
                schedule = own.build(*counts, **options)
            except ScheduleError:
                continue  # Not defined for these counts.
            if _is_as_requested(request, schedule):
                yield from _candidate(request, schedule)


def _option_choices(builder: Callable[..., Schedule], request: Request) -> Iterator[dict[str, Any]]:
    """Every combination of a builder's options that can matter here."""
    choices: dict[str, tuple[Any, ...]] = {
        "recompute": (False, True),
        "early_everywhere": (False, True),
        "method": ("direct", "forward_doubling"),
        "chunks": (request.costs.num_stages // request.num_ranks,),
        "pairs": tuple(range(1, request.max_copies // 2 + 1)),
    }
    taken = [p for p in inspect.signature(builder).parameters if p in choices]
    for values in itertools.product(*(choices[option] for option in taken)):
        yield dict(zip(taken, values))


def _is_as_requested(request: Request, schedule: Schedule) -> bool:
    if not schedule.is_synchronous or schedule.num_stages != request.costs.num_stages:
        return False
    if len(schedule.pipes) > request.max_copies:
        return False
    if request.recompute is not None and schedule.recompute != request.recompute:
        return False
    return request.split is None or request.split == schedule.splits_backwards


def _list_schedules(request: Request, work: Sequence[Job]) -> Iterator[_Candidate]:
    """List schedules by every rule, as many as the size allows."""
    every = [(job, policy) for job in work for policy in policies(job)]
    per_list = 3 * request.num_microbatches * request.costs.num_stages
    for job, policy in _evenly(every, max(8, _LIST_ACTIONS // per_list)):
        lists = list_schedule(job, policy)
        if lists is not None:
            recompute = [seconds is not None for seconds in job.recompute_s]
            schedule = single_pipe("auto", job.ranks, lists, request.num_microbatches, recompute)
            yield from _candidate(request, schedule)


def _evenly(every: list[tuple[Job, Any]], most: int) -> list[tuple[Job, Any]]:
    """A limited number of policies, as many of every job, the first of each."""
    per_job = itertools.groupby(every, key=lambda pair: id(pair[0]))
    in_turn = itertools.zip_longest(*(list(group) for _, group in per_job))
    return [pair for turn in in_turn for pair in turn if pair is not None][:most]


def _candidate(request: Request, schedule: Schedule) -> Iterator[_Candidate]:
    simulation = simulate(schedule, request.costs)
    if max(simulation.peak_memory_bytes) <= request.memory_limit_bytes:
        yield _Candidate(simulation)


def _improved(request: Request, candidate: _Candidate) -> _Candidate:
    """The candidate, shortened by local search where that is possible."""
    schedule = candidate.simulation.schedule
    if len(schedule.pipes) > 1:
        return candidate
    ranks = schedule.pipes[0]
    bound_s = lower_bound(make_job(request, ranks, schedule.recompute, schedule.splits_backwards))
    limits = activation_limits(request, ranks)
    better = improve(schedule, request.costs, limits, bound_s, _SEARCH_ACTIONS // _NUM_STARTS)
    return min((candidate, *_candidate(request, better)), key=lambda c: c.key)
