"""The simulator: when every action runs, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from merak.core.errors import ScheduleError
from merak.schedule.action_table import NONE, ActionTable, FloatArray, tabulate
from merak.schedule.costs import Costs
from merak.schedule.ir import FINAL_KINDS, Kind, Schedule
from merak.schedule.reductions import Reduction, time_reductions
from merak.schedule.simulator import memory
from merak.schedule.simulator.timing import Links, Timing, time_actions, time_actions_with_links


@dataclass(frozen=True, slots=True)
class Simulation:
    """One iteration of a schedule, simulated. Arrays are indexed like `table`."""

    schedule: Schedule
    table: ActionTable
    start: FloatArray
    end: FloatArray
    reductions: tuple[Reduction, ...]
    # From the iteration's start to the end of the last action or reduction, s.
    makespan: float
    # Idle time ÷ total time, over all ranks.
    bubble_fraction: float
    # Microbatches in flight, per rank, summed over the stages of the rank.
    peak_in_flight: tuple[int, ...]
    peak_memory_bytes: tuple[float, ...]
    # Indices of the actions without slack that lead to the end, first action first.
    critical_path: tuple[int, ...]


def simulate(schedule: Schedule, costs: Costs) -> Simulation:
    """Run a schedule on paper: every action as early as its rank's order and its data allow.

    Args:
        schedule: a valid schedule; see `merak.schedule.validate.schedule`.
        costs: times and sizes of its stages.

    Raises:
        ScheduleError: the costs are of another number of stages, or ranks wait for one another.
    """
    if costs.num_stages != schedule.num_stages:
        raise ScheduleError(
            f"The costs are of {costs.num_stages} stages and {schedule.name} has "
            f"{schedule.num_stages}; give one value per stage."
        )
    table = tabulate(schedule)
    duration = durations(schedule, table, costs)
    timing, held_until = _time(schedule, table, duration, costs)
    reductions = time_reductions(schedule, table, timing.end, costs.reduction_s)
    last = max((r.end for r in reductions), default=0.0)
    makespan = max(float(timing.end.max(initial=0.0)), last)
    busy = float(duration.sum())
    total = makespan * schedule.num_ranks
    state = memory.state_bytes(schedule, costs)
    activations = memory.peak_per_rank(table, memory.activation_bytes(schedule, table, costs))
    return Simulation(
        schedule=schedule,
        table=table,
        start=timing.start,
        end=timing.end,
        reductions=reductions,
        makespan=makespan,
        bubble_fraction=1.0 - busy / total if total else 0.0,
        peak_in_flight=tuple(map(int, memory.peak_per_rank(table, memory.in_flight(table)))),
        peak_memory_bytes=tuple(a + b for a, b in zip(state, activations)),
        critical_path=_critical_path(table, timing, held_until, reductions),
    )


def durations(schedule: Schedule, table: ActionTable, costs: Costs) -> FloatArray:
    """How long every action takes, with the recomputations and updates that happen inside it."""
    duration = np.zeros(table.num_actions)
    per_stage = {
        Kind.FORWARD: costs.forward_s,
        Kind.RECOMPUTE: costs.recompute_s,
        Kind.BACKWARD: costs.backward_s,
        Kind.INPUT_GRADIENT: costs.input_gradient_s,
        Kind.WEIGHT_GRADIENT: costs.weight_gradient_s,
    }
    for kind, seconds in per_stage.items():
        chosen = table.is_kind(kind)
        duration[chosen] = np.array(seconds)[table.stage[chosen]]
    recomputing = memory.recomputes_inside(schedule, table)
    for kind, added in (
        (Kind.BACKWARD, costs.recompute_in_backward_s),
        (Kind.INPUT_GRADIENT, costs.recompute_in_input_gradient_s),
    ):
        chosen = recomputing & table.is_kind(kind)
        duration[chosen] += np.array(added)[table.stage[chosen]]
    if costs.rank_factors:
        duration *= np.array(costs.rank_factors)[table.rank, table.stage]
    if not schedule.is_synchronous:
        # The rank waits for an update's reduction before it goes on with the new weights.
        updates = table.is_kind(*FINAL_KINDS)
        updates &= (table.microbatch + 1) % schedule.microbatches_per_update == 0
        duration[updates] += np.array(costs.reduction_s)[table.stage[updates]]
    return duration


def transfer_delays(table: ActionTable, costs: Costs) -> FloatArray:
    """From the end of an action to the arrival of its output, where transfers do not queue up."""
    links = _links(table, costs)
    return links.occupancy_s + links.latency_s


def _time(
    schedule: Schedule, table: ActionTable, duration: FloatArray, costs: Costs
) -> tuple[Timing, FloatArray]:
    """Timing of the actions, and the time until which each occupies its rank."""
    if all(link.latency_s == 0 for link in costs.links) and not any(costs.boundary_bytes):
        timing = time_actions(schedule, table, duration)
        return timing, timing.end
    links = _links(table, costs)
    timing = time_actions_with_links(schedule, table, duration, links)
    blocked = (links.link != NONE) & (not costs.overlap)
    return timing, np.where(blocked, timing.arrival, timing.end)


def _links(table: ActionTable, costs: Costs) -> Links:
    """The link, occupancy and latency of every output that leaves its rank."""
    num_ranks = len(table.starts) - 1
    consumer = np.flatnonzero(table.crosses)
    producer = table.source[consumer]
    forward = table.kind[producer] == ord(Kind.FORWARD.value)
    boundary = np.where(forward, table.stage[producer], table.stage[producer] - 1)
    pair = table.rank[producer] * num_ranks + table.rank[consumer]
    _, number = np.unique(pair * 2 + forward, return_inverse=True)
    link = np.full(table.num_actions, NONE, dtype=np.int64)
    link[producer] = number
    seconds = np.array(
        [size / way.bandwidth_bytes_per_s for size, way in zip(costs.boundary_bytes, costs.links)]
    )
    latencies = np.array([way.latency_s for way in costs.links])
    occupancy, latency = np.zeros(table.num_actions), np.zeros(table.num_actions)
    occupancy[producer] = seconds[boundary]
    latency[producer] = latencies[boundary]
    return Links(link, occupancy, latency, costs.overlap)


def _critical_path(
    table: ActionTable,
    timing: Timing,
    held_until: FloatArray,
    reductions: tuple[Reduction, ...],
) -> tuple[int, ...]:
    """Follow the latest reason backwards from whatever ends last."""
    if not table.num_actions:
        return ()
    current = int(np.argmax(timing.end))
    last = max(reductions, key=lambda reduction: reduction.end, default=None)
    if last is not None and last.end > timing.end[current]:
        current = last.after
    first_of_rank = set(table.starts)
    path = [current]
    while True:
        source = int(table.source[current])
        previous = NONE if current in first_of_rank else current - 1
        if source != NONE and (previous == NONE or timing.arrival[source] > held_until[previous]):
            current = source
        elif previous != NONE:
            current = previous
        else:
            return tuple(reversed(path))
        path.append(current)
