"""Idle time of a measured step: every gap of every rank with its cause, and the critical path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from statistics import median

from merak.record.run import MeasuredStep, Record
from merak.schedule.action_table import NONE, tabulate
from merak.schedule.ir import Action, Kind, Schedule


class Cause(Enum):
    """Cause of idle time of a rank."""

    FILL = "pipeline fill"
    DRAIN = "pipeline drain"
    WAIT = "wait for another stage"
    TRANSFER = "transfer"
    HOST = "between actions"


MEANINGS: Mapping[Cause, str] = {
    Cause.FILL: "before the first microbatch arrives",
    Cause.DRAIN: "behind the last action, until the last rank is done",
    Cause.WAIT: "its next input is still being computed on another rank",
    Cause.TRANSFER: "its next input has been computed and is on its way",
    Cause.HOST: "its input is there: launches, Python, copies",
}
"""Meaning of each cause, to go on after "idle:"."""


@dataclass(frozen=True, slots=True)
class Idle:
    """Idle time of a pp rank.

    Args:
        rank: the pp rank.
        start_s: its beginning, on the clock of the step.
        end_s: its end.
        cause: of it.
        awaited: the action of another rank that is waited for; None for none.
        on: its rank; None for none.
    """

    rank: int
    start_s: float
    end_s: float
    cause: Cause
    awaited: Action | None = None
    on: int | None = None

    @property
    def seconds(self) -> float:
        """Length of the idle time, s."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Traced:
    """Measured action with the action whose output it takes.

    Args:
        action: the action.
        rank: the pp rank that performs it.
        start_s: its beginning, when it has received its inputs.
        end_s: its end.
        source: action of another rank whose output it takes; None for none.
    """

    action: Action
    rank: int
    start_s: float
    end_s: float
    source: Action | None


def sources_of(schedule: Schedule) -> dict[Action, Action]:
    """Actions whose input comes from another rank, and the actions that compute it."""
    table = tabulate(schedule)
    every = list(chain.from_iterable(schedule.actions))
    return {
        every[index]: every[source]
        for index, source in enumerate(table.source.tolist())
        if source != NONE and table.crosses[index]
    }


def traced(step: MeasuredStep) -> tuple[tuple[Traced, ...], ...]:
    """Measured actions of every rank in order, with their sources."""
    sources = sources_of(step.schedule)
    return tuple(
        tuple(_traced(record, rank, sources) for record in own)
        for rank, own in enumerate(step.records)
    )


def _traced(record: Record, rank: int, sources: Mapping[Action, Action]) -> Traced:
    action, start_s, end_s = record
    return Traced(action, rank, start_s, end_s, sources.get(action))


def transfer_s(step: MeasuredStep) -> dict[int, float]:
    """Seconds that an output travels over each boundary between stages, the median.

    Only those outputs count that a rank was free to receive at once.

    Returns:
        By the stage before the boundary; boundaries that nothing was seen of are left out.
    """
    ends = _ends(step)
    found: dict[int, list[float]] = {}
    for own in traced(step):
        free_s = step.begin_s
        for item in own:
            if item.source is not None and ends[item.source][1] >= free_s:
                found.setdefault(_boundary(item.action), []).append(
                    max(0.0, item.start_s - ends[item.source][1])
                )
            free_s = item.end_s
    return {boundary: median(seconds) for boundary, seconds in found.items()}


def _boundary(action: Action) -> int:
    return action.stage - 1 if action.kind is Kind.FORWARD else action.stage


def _ends(step: MeasuredStep) -> dict[Action, tuple[int, float]]:
    """Rank and end of every action."""
    return {
        action: (rank, end_s) for rank, own in enumerate(step.records) for action, _, end_s in own
    }


def idle_times(step: MeasuredStep) -> tuple[Idle, ...]:
    """Idle times of all ranks between the step's beginning and its last action, with causes.

    Args:
        step: a measured one.
    """
    ends, travel_s = _ends(step), transfer_s(step)
    last_s = step.begin_s + step.pipeline_s
    found: list[Idle] = []
    for rank, own in enumerate(traced(step)):
        free_s = step.begin_s
        for item in own:
            if item.start_s > free_s:
                found.extend(_gap(item, free_s, ends, travel_s, is_first=item is own[0]))
            free_s = max(free_s, item.end_s)
        if last_s > free_s:
            found.append(Idle(rank, free_s, last_s, Cause.DRAIN))
    return tuple(found)


def _gap(
    item: Traced,
    free_s: float,
    ends: Mapping[Action, tuple[int, float]],
    travel_s: Mapping[int, float],
    *,
    is_first: bool,
) -> Iterator[Idle]:
    """Idle times in front of an action, from the moment at which its rank was free."""
    if item.source is None:
        yield Idle(item.rank, free_s, item.start_s, Cause.FILL if is_first else Cause.HOST)
        return
    on, ready_s = ends[item.source]
    arrival_s = ready_s + travel_s.get(_boundary(item.action), 0.0)
    waiting = Cause.FILL if is_first else Cause.WAIT
    start_s = free_s
    for end_s, cause in ((ready_s, waiting), (arrival_s, Cause.TRANSFER), (None, Cause.HOST)):
        until_s = item.start_s if end_s is None else min(end_s, item.start_s)
        if until_s > start_s:
            yield Idle(item.rank, start_s, until_s, cause, item.source, on)
            start_s = until_s


def idle_by_cause(idle: Sequence[Idle], rank: int) -> dict[Cause, float]:
    """Seconds of a rank's idle time by their cause."""
    return {
        cause: sum(own.seconds for own in idle if own.rank == rank and own.cause is cause)
        for cause in Cause
    }


def critical_path(step: MeasuredStep) -> tuple[Action, ...]:
    """Actions that lead without slack to the last one: each waited for the one before it.

    Args:
        step: a measured one.
    """
    rows = traced(step)
    places = {item.action: (item, index) for own in rows for index, item in enumerate(own)}
    if not places:
        return ()
    item, index = max(places.values(), key=lambda place: place[0].end_s)
    path = [item.action]
    while True:
        before = rows[item.rank][index - 1] if index else None
        source = None if item.source is None else places[item.source]
        if source is not None and (before is None or source[0].end_s > before.end_s):
            item, index = source
        elif before is not None:
            item, index = before, index - 1
        else:
            return tuple(reversed(path))
        path.append(item.action)
