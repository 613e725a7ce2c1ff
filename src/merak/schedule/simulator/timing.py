"""The inner loop of the simulator: start and end of every action, in one pass over the lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from merak.core.errors import ScheduleError
from merak.schedule.action_table import NONE, ActionTable, FloatArray, IntArray
from merak.schedule.ir import Schedule

_NOT_YET = -1.0


@dataclass(frozen=True, slots=True)
class Links:
    """How outputs travel to another rank, one entry per producing action."""

    # The link an output takes, NONE where it stays on its rank. Transfers on a link queue up.
    link: IntArray
    # Time during which the transfer occupies the link.
    occupancy_s: FloatArray
    latency_s: FloatArray
    # Whether the producing rank computes on while its output travels.
    overlap: bool


@dataclass(frozen=True, slots=True)
class Timing:
    """When every action runs, and when its output reaches the action that waits for it."""

    start: FloatArray
    end: FloatArray
    arrival: FloatArray


def time_actions(schedule: Schedule, table: ActionTable, duration: FloatArray) -> Timing:
    """Run every rank's list as early as its order and the data allow, with free transfers.

    Args:
        schedule: the schedule, for messages.
        table: its actions.
        duration: duration of every action, s.

    Raises:
        ScheduleError: ranks wait for one another for ever.
    """
    start, end, stops = _run(table, duration.tolist())
    _check_finished(schedule, table, stops)
    ends = np.array(end)
    return Timing(np.array(start), ends, ends)


def time_actions_with_links(
    schedule: Schedule, table: ActionTable, duration: FloatArray, links: Links
) -> Timing:
    """Like `time_actions`, with transfers that take time on the links between ranks.

    Raises:
        ScheduleError: ranks wait for one another for ever.
    """
    start, end, arrival, stops = _run_with_links(table, duration.tolist(), links)
    _check_finished(schedule, table, stops)
    return Timing(np.array(start), np.array(end), np.array(arrival))


def _run(table: ActionTable, duration: list[float]) -> tuple[list[float], list[float], list[int]]:
    """One pass for free transfers. Flat lists and no calls: a million actions take a second."""
    source: list[int] = table.source.tolist()
    start = [0.0] * len(source)
    end = [_NOT_YET] * len(source)
    waiting = [NONE] * len(source)
    position = list(table.starts[:-1])
    free = [0.0] * len(position)
    runnable = list(range(len(position)))
    while runnable:
        rank = runnable.pop()
        stop, now = table.starts[rank + 1], free[rank]
        for i in range(position[rank], stop):
            needed = source[i]
            if needed >= 0:
                ready = end[needed]
                if ready < 0.0:
                    waiting[needed] = rank
                    position[rank] = i
                    break
                if ready > now:
                    now = ready
            start[i] = now
            now += duration[i]
            end[i] = now
            if waiting[i] >= 0:
                runnable.append(waiting[i])
        else:
            position[rank] = stop
        free[rank] = now
    return start, end, position


def _run_with_links(
    table: ActionTable, duration: list[float], links: Links
) -> tuple[list[float], list[float], list[float], list[int]]:
    """The same pass with links; apart from `_run`, which it would slow down by half."""
    source: list[int] = table.source.tolist()
    link: list[int] = links.link.tolist()
    occupancy: list[float] = links.occupancy_s.tolist()
    latency: list[float] = links.latency_s.tolist()
    link_free = [0.0] * (max(link, default=0) + 1)
    start = [0.0] * len(source)
    end = [0.0] * len(source)
    arrival = [_NOT_YET] * len(source)
    waiting = [NONE] * len(source)
    position = list(table.starts[:-1])
    free = [0.0] * len(position)
    runnable = list(range(len(position)))
    while runnable:
        rank = runnable.pop()
        stop, now = table.starts[rank + 1], free[rank]
        for i in range(position[rank], stop):
            needed = source[i]
            if needed >= 0:
                ready = arrival[needed]
                if ready < 0.0:
                    waiting[needed] = rank
                    position[rank] = i
                    break
                if ready > now:
                    now = ready
            start[i] = now
            now += duration[i]
            end[i] = now
            if link[i] >= 0:
                departed = max(now, link_free[link[i]]) + occupancy[i]
                link_free[link[i]] = departed
                arrival[i] = departed + latency[i]
                if not links.overlap:
                    now = arrival[i]
            else:
                arrival[i] = now
            if waiting[i] >= 0:
                runnable.append(waiting[i])
        else:
            position[rank] = stop
        free[rank] = now
    return start, end, arrival, position


def _check_finished(schedule: Schedule, table: ActionTable, stops: Sequence[int]) -> None:
    stuck = [rank for rank, stop in enumerate(stops) if stop < table.starts[rank + 1]]
    if not stuck:
        return
    lines = []
    for rank in stuck[:4]:
        position = stops[rank] - table.starts[rank]
        action = schedule.actions[rank][position]
        needed = int(table.source[stops[rank]])
        giver = int(table.rank[needed])
        other = schedule.actions[giver][needed - table.starts[giver]]
        lines.append(f"rank {rank} at position {position} ({action}) waits for {other} of {giver}")
    raise ScheduleError(
        f"{schedule.name} cannot finish, because ranks wait for one another: "
        f"{'; '.join(lines)}. Reorder these actions."
    )
