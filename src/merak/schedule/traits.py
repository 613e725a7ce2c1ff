"""Traits of schedules, by which planners judge schedules that they do not know by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from merak.schedule.changes import recomputing
from merak.schedule.costs import uniform
from merak.schedule.ir import Kind, Schedule
from merak.schedule.simulator.simulate import simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Traits of a schedule of given numbers of ranks and microbatches.

    Args:
        num_stages: of the whole model.
        bubble: idle time of a rank with equal stages, in times of its work on one microbatch.
        in_flight: most microbatches in flight on a rank; one on some of its stages counts in part.
        splits_backwards: whether weight gradients have actions of their own.
        is_fifo: whether a stage waits for whole forwards, and those before it for whole backwards:
            one stage a rank, and neither recomputation ahead of a gradient nor split backwards.
        joins_ends: whether a rank has the first and the last stage of a microbatch.
        holds_one_at_end: whether the last stage runs a microbatch's backward before the next one's
            forward.
        is_synchronous: whether there is one version of the weights.
        num_copies: of the model on the ranks, whose gradients are summed.
    """

    num_stages: int
    bubble: float
    in_flight: float
    splits_backwards: bool = False
    is_fifo: bool = False
    joins_ends: bool = False
    holds_one_at_end: bool = True
    is_synchronous: bool = True
    num_copies: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Builder:
    """Builder of a schedule, and what it says of its schedules.

    Args:
        build: (num_ranks, num_microbatches, **options) to a schedule; raises where it has none.
        searched: options that a search for plans tries in every layout.
        tried: options that it tries in the layout of the fastest plan alone.
        formula: traits for the same arguments, where they need no schedule; raises as `build`.
    """

    build: Callable[..., Schedule]
    searched: tuple[Mapping[str, Any], ...] = ()
    tried: tuple[Mapping[str, Any], ...] = ()
    formula: Callable[..., Traits] | None = None


def traits_of(schedule: Schedule) -> Traits:
    """Traits of any schedule, from its lists and their simulation with equal stages."""
    stages, ranks = schedule.num_stages, schedule.num_ranks
    kinds = {action.kind for own in schedule.actions for action in own}
    costs = uniform(stages)
    simulation = simulate(recomputing(schedule, (False,) * stages), costs)
    work_s = (costs.forward_s[0] + costs.backward_s[0]) * stages / ranks
    return Traits(
        num_stages=stages,
        bubble=simulation.makespan / work_s - schedule.num_microbatches,
        in_flight=max(simulation.peak_in_flight) * ranks / stages,
        splits_backwards=schedule.splits_backwards,
        is_fifo=kinds <= {Kind.FORWARD, Kind.BACKWARD}
        and len(schedule.pipes) == 1
        and not schedule.has_several_stages_per_rank,
        joins_ends=all(pipe[0] == pipe[-1] for pipe in schedule.pipes),
        holds_one_at_end=schedule.holds_one_at_end,
        is_synchronous=schedule.is_synchronous,
        num_copies=schedule.num_copies,
    )
