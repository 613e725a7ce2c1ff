"""Local search: shorten a schedule by moving actions along its critical path.

Tabu search as for job shops: only moves inside runs of actions that follow one another on a rank
and on the critical path can shorten it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from itertools import chain
from random import Random

from merak.schedule.action_table import NONE, tabulate
from merak.schedule.costs import Costs
from merak.schedule.ir import GRADIENT_KINDS, Action, Kind, Schedule
from merak.schedule.simulator.memory import activation_changes
from merak.schedule.simulator.simulate import durations, transfer_delays

_NEVER = float("inf")
# Moves that may not be turned back at once.
_TENURE = 12
# An instance is too large to search where there is time for fewer runs than this.
_LEAST_RUNS = 100
# Moves without a new best before the search starts again from the best, shaken.
_PATIENCE = 60
_NUM_SHAKES = 6
_TOLERANCE = 1e-9

Orders = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class _Problem:
    """Constants of a search, indexed by action: they do not change while actions move."""

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
    """Start and end of every action."""

    start: list[float]
    end: list[float]
    makespan: float


@dataclass(frozen=True, slots=True)
class _Solution:
    """Orders of all ranks, and how they run."""

    orders: Orders
    run: _Run

    @property
    def makespan(self) -> float:
        """How long the orders take; for ever where ranks wait for one another."""
        return self.run.makespan


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
    schedule = _with_own_recomputes(schedule)
    problem, orders = _prepare(schedule, costs, limit_bytes)
    # Where an instance is too large to search, its start is all there is.
    left = num_actions // max(1, len(problem.actions))
    left = left if left >= _LEAST_RUNS else 0
    best = current = _Solution(orders, _run(problem, orders))
    tabu: deque[tuple[int, int]] = deque(maxlen=_TENURE)
    draw = Random(0)
    stalled = 0
    while left > 0 and best.makespan > target_s + _TOLERANCE:
        neighbours = _neighbours(problem, current)
        left -= len(neighbours) + 1
        following = _best_move(problem, neighbours, tabu, best.makespan)
        if following is None or stalled > _PATIENCE:
            current, stalled = _shaken(problem, best, draw), 0
            tabu.clear()
            continue
        current, stalled = following, stalled + 1
        if current.makespan < best.makespan - _TOLERANCE:
            best, stalled = current, 0
    lists = tuple(tuple(problem.actions[i] for i in order) for order in best.orders)
    return replace(schedule, actions=lists)


def _with_own_recomputes(schedule: Schedule) -> Schedule:
    """The schedule with an R right before every backward that would recompute inside."""
    own = {(a.stage, a.microbatch) for a in chain(*schedule.actions) if a.kind is Kind.RECOMPUTE}
    lists = []
    for actions in schedule.actions:
        result = []
        for action in actions:
            inside = schedule.recompute[action.stage] and action.kind in GRADIENT_KINDS
            if inside and (action.stage, action.microbatch) not in own:
                result.append(Action(Kind.RECOMPUTE, action.stage, action.microbatch))
            result.append(action)
        lists.append(tuple(result))
    return replace(schedule, actions=tuple(lists))


def _best_move(
    problem: _Problem,
    neighbours: list[tuple[Orders, tuple[int, int]]],
    tabu: deque[tuple[int, int]],
    best_s: float,
) -> _Solution | None:
    """The shortest neighbour that is not tabu, or is shorter than any before; and its tabu."""
    chosen: tuple[_Solution, tuple[int, int]] | None = None
    for orders, pair in neighbours:
        if not _fits(problem, orders, pair[0]):
            continue
        solution = _Solution(orders, _run(problem, orders))
        if pair in tabu and solution.makespan >= best_s - _TOLERANCE:
            continue
        if chosen is None or solution.makespan < chosen[0].makespan:
            chosen = solution, pair
    if chosen is None or chosen[0].makespan == _NEVER:
        return None
    tabu.append((chosen[1][1], chosen[1][0]))
    return chosen[0]


def _shaken(problem: _Problem, solution: _Solution, draw: Random) -> _Solution:
    """A solution some random steps away, from which to search anew."""
    for _ in range(_NUM_SHAKES):
        rank = draw.randrange(len(solution.orders))
        order = solution.orders[rank]
        if len(order) < 2:
            continue
        place = draw.randrange(len(order) - 1)
        moved = _move(problem, order, place + 1, place)
        if moved is None:
            continue
        orders = (*solution.orders[:rank], moved, *solution.orders[rank + 1 :])
        shaken = _Solution(orders, _run(problem, orders))
        if _fits(problem, orders, moved[place]) and shaken.makespan < _NEVER:
            solution = shaken
    return solution


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


def _run(problem: _Problem, orders: Orders) -> _Run:
    """Run every rank's order as early as the data allow."""
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
    return _Run(start, end, _NEVER if left else max(end))


def _neighbours(problem: _Problem, solution: _Solution) -> list[tuple[Orders, tuple[int, int]]]:
    """Orders one move away, each with the (later, earlier) pair of actions that it turned round."""
    result = []
    orders = solution.orders
    for rank, first, stop in _critical_runs(problem, orders, solution.run):
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
