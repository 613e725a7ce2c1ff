"""Local search: shorten a schedule by moving actions along its critical path.

Tabu search as for job shops: only moves inside runs of actions that follow one another on a rank
and on the critical path can shorten it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from merak.schedule.costs import Costs
from merak.schedule.ir import Action, Schedule
from merak.schedule.memory import activation_changes
from merak.schedule.simulate import durations, transfer_delays
from merak.schedule.table import NONE, tabulate

_TENURE = 12
_TOLERANCE = 1e-9

Orders = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class _Problem:
    """What does not change while actions move, indexed by action."""

    actions: tuple[Action, ...]
    source: list[int]
    duration: list[float]
    # From the end of an action to the moment its output is where it is needed.
    delay: list[float]
    gained: list[float]
    released: list[float]
    # Per rank, for activations.
    limit: list[float]


@dataclass(frozen=True, slots=True)
class _Run:
    """How long some orders take, and the way back along the critical path."""

    makespan: float
    start: list[float]
    end: list[float]


def improve(
    schedule: Schedule,
    costs: Costs,
    limit_bytes: tuple[float, ...],
    target_s: float,
    num_actions: int,
) -> Schedule:
    """Shorten a schedule without holding more than the limit.

    Args:
        schedule: where to start; valid, and within the limit.
        costs: what its stages cost. Transfers are taken as delays that do not queue up.
        limit_bytes: per rank, for activations.
        target_s: a makespan to be content with, such as a lower bound.
        num_actions: how much to search: actions that may be simulated in all.

    Returns:
        The best schedule found, the given one where there is none.
    """
    problem, orders = _prepare(schedule, costs, limit_bytes)
    run = _evaluate(problem, orders)
    assert run is not None
    best, best_orders = run.makespan, orders
    tabu: deque[tuple[int, int]] = deque(maxlen=_TENURE)
    left = num_actions // max(1, len(problem.actions))
    while left > 0 and best > target_s + _TOLERANCE:
        chosen: tuple[_Run, Orders, tuple[int, int]] | None = None
        for moved, pair in _neighbours(problem, orders, run):
            left -= 1
            outcome = _evaluate(problem, moved) if _fits(problem, moved, pair[0]) else None
            if outcome is None or (pair in tabu and outcome.makespan >= best - _TOLERANCE):
                continue
            if chosen is None or outcome.makespan < chosen[0].makespan:
                chosen = outcome, moved, pair
        if chosen is None:
            break
        run, orders, pair = chosen
        tabu.append((pair[1], pair[0]))
        if run.makespan < best - _TOLERANCE:
            best, best_orders = run.makespan, orders
    lists = tuple(tuple(problem.actions[i] for i in order) for order in best_orders)
    return replace(schedule, actions=lists)


def _prepare(
    schedule: Schedule, costs: Costs, limit_bytes: tuple[float, ...]
) -> tuple[_Problem, Orders]:
    table = tabulate(schedule)
    gained, released = activation_changes(schedule, table, costs)
    problem = _Problem(
        actions=tuple(action for actions in schedule.actions for action in actions),
        source=table.source.tolist(),
        duration=durations(schedule, table, costs).tolist(),
        delay=transfer_delays(table, costs).tolist(),
        gained=gained.tolist(),
        released=released.tolist(),
        limit=list(limit_bytes),
    )
    orders = tuple(tuple(range(first, stop)) for first, stop in zip(table.starts, table.starts[1:]))
    return problem, orders


def _evaluate(problem: _Problem, orders: Orders) -> _Run | None:
    """Start and end of every action; None where the orders wait for one another."""
    source, duration, delay = problem.source, problem.duration, problem.delay
    start, end = [0.0] * len(source), [-1.0] * len(source)
    waiting = [NONE] * len(source)
    position, free = [0] * len(orders), [0.0] * len(orders)
    runnable = list(range(len(orders)))
    left = len(source)
    while runnable:
        rank = runnable.pop()
        order, now = orders[rank], free[rank]
        for place in range(position[rank], len(order)):
            i = order[place]
            needed = source[i]
            if needed >= 0:
                if end[needed] < 0.0:
                    waiting[needed] = rank
                    position[rank] = place
                    break
                now = max(now, end[needed] + delay[needed])
            start[i] = now
            now += duration[i]
            end[i] = now
            left -= 1
            if waiting[i] >= 0:
                runnable.append(waiting[i])
        else:
            position[rank] = len(order)
        free[rank] = now
    return None if left else _Run(max(end), start, end)


def _neighbours(
    problem: _Problem, orders: Orders, run: _Run
) -> list[tuple[Orders, tuple[int, int]]]:
    """Orders one move away, each with the (later, earlier) pair of actions that it turned round."""
    result = []
    for rank, first, stop in _critical_runs(problem, orders, run):
        order = orders[rank]
        moves = {(place + 1, place) for place in range(first, stop - 1)}
        moves |= {(place, first) for place in range(first + 1, stop)}
        moves |= {(place, stop - 1) for place in range(first, stop - 1)}
        for origin, target in sorted(moves):
            moved = _move(problem, order, origin, target)
            if moved is not None:
                earlier, later = sorted((origin, target))
                changed = (*orders[:rank], moved, *orders[rank + 1 :])
                result.append((changed, (order[later], order[earlier])))
    return result


def _critical_runs(problem: _Problem, orders: Orders, run: _Run) -> list[tuple[int, int, int]]:
    """(rank, first place, stop) of the stretches that the critical path spends on a rank."""
    where = {i: (rank, place) for rank, order in enumerate(orders) for place, i in enumerate(order)}
    current = run.end.index(run.makespan)
    rank, place = where[current]
    result, stop = [], place + 1
    while True:
        needed = problem.source[current]
        previous = orders[rank][place - 1] if place else NONE
        if previous != NONE and run.end[previous] >= run.start[current] - _TOLERANCE:
            current, place = previous, place - 1
            continue
        if stop - place > 1:
            result.append((rank, place, stop))
        if needed == NONE:
            return result
        current = needed
        rank, place = where[current]
        stop = place + 1


def _move(
    problem: _Problem, order: tuple[int, ...], origin: int, target: int
) -> tuple[int, ...] | None:
    """The order with one action moved, unless that breaks the data flow or changes nothing."""
    mover = order[origin]
    passed = order[target:origin] if target < origin else order[origin + 1 : target + 1]
    for other in passed:
        earlier, later = (other, mover) if target < origin else (mover, other)
        if not _may_swap(problem, earlier, later):
            return None
    rest = order[:origin] + order[origin + 1 :]
    return (*rest[:target], mover, *rest[target:])


def _may_swap(problem: _Problem, earlier: int, later: int) -> bool:
    a, b = problem.actions[earlier], problem.actions[later]
    if problem.source[later] == earlier or (a.stage, a.microbatch) == (b.stage, b.microbatch):
        return False
    # Microbatches are alike: their order within a kind and stage stays.
    return (a.kind, a.stage) != (b.kind, b.stage)


def _fits(problem: _Problem, orders: Orders, changed: int) -> bool:
    """Whether the rank of a moved action stays within its limit."""
    rank = next(r for r, order in enumerate(orders) if changed in order)
    level, limit = 0.0, problem.limit[rank] + _TOLERANCE
    for i in orders[rank]:
        level += problem.gained[i]
        if level > limit:
            return False
        level -= problem.released[i]
    return True
