"""Lowering: from a schedule's actions to the full list of steps of every rank.

Why no list of steps can deadlock: all computations and transfers of all ranks have one total order,
that of the simulated start times. Every rank's list follows it, so even an engine whose sends wait
for their receives always has a rank that can go on: the one with the earliest open step. Receives
are then moved ahead (never back), which only lets sends complete sooner.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from merak.schedule.action_table import ActionTable, IntArray, tabulate
from merak.schedule.ir import Kind, Schedule
from merak.schedule.reductions import reduction_points
from merak.schedule.simulator.timing import time_actions
from merak.schedule.steps import (
    Compute,
    OptimizerStep,
    Payload,
    Receive,
    ReduceGradients,
    Send,
    Step,
)

_UNIT_DURATION = {
    Kind.FORWARD: 1.0,
    Kind.RECOMPUTE: 1.0,
    Kind.BACKWARD: 2.0,
    Kind.INPUT_GRADIENT: 1.0,
    Kind.WEIGHT_GRADIENT: 1.0,
}


@dataclass(frozen=True, slots=True)
class Transfer:
    """An output that travels from the rank of one action to the rank of another."""

    payload: Payload
    stage: int
    microbatch: int
    # Indices into the action table.
    producer: int
    consumer: int
    sender: int
    receiver: int


def lower(schedule: Schedule) -> tuple[tuple[Step, ...], ...]:
    """Derive every rank's steps: its actions, transfers, reductions and optimizer steps.

    Args:
        schedule: a valid schedule; see `merak.schedule.validate.schedule`.

    Returns:
        One tuple of steps per rank. A `Receive` stands at the latest one action before the one that
        needs it, and on every ordered pair of ranks the receives of a payload stand in the order of
        the sends.

    Raises:
        ScheduleError: ranks wait for one another for ever.
    """
    table = tabulate(schedule)
    order = total_order(schedule, table)
    sends, receives = _place_transfers(table, transfers(table), order)
    return tuple(
        _rank_steps(schedule, rank, sends, receives[rank], table.starts[rank])
        for rank in range(schedule.num_ranks)
    )


def total_order(schedule: Schedule, table: ActionTable) -> IntArray:
    """Each action's place in one order of all actions that every rank and every transfer obeys.

    Raises:
        ScheduleError: there is none, because ranks wait for one another.
    """
    duration = np.zeros(table.num_actions)
    for kind, unit in _UNIT_DURATION.items():
        duration[table.is_kind(kind)] = unit
    start = time_actions(schedule, table, duration).start
    place = np.empty(table.num_actions, dtype=np.int64)
    # Durations are positive, so a source starts strictly before the action that waits for it; the
    # sort is stable, so equal starts on different ranks are told apart by rank.
    place[np.argsort(start, kind="stable")] = np.arange(table.num_actions)
    return place


def transfers(table: ActionTable) -> list[Transfer]:
    """Every output that must travel; neighbouring stages on one rank need none."""
    result = []
    for consumer in np.flatnonzero(table.crosses).tolist():
        producer = int(table.source[consumer])
        is_forward = int(table.kind[producer]) == ord(Kind.FORWARD.value)
        result.append(
            Transfer(
                Payload.ACTIVATION if is_forward else Payload.GRADIENT,
                int(table.stage[producer]),
                int(table.microbatch[producer]),
                producer,
                consumer,
                int(table.rank[producer]),
                int(table.rank[consumer]),
            )
        )
    return result


def _place_transfers(
    table: ActionTable, every: list[Transfer], order: IntArray
) -> tuple[dict[int, Send], list[dict[int, list[Receive]]]]:
    """Sends by producing action, and per rank the receives to post before each position."""
    sends = {t.producer: Send(t.payload, t.stage, t.microbatch, t.receiver) for t in every}
    channels = defaultdict(list)
    for transfer in every:
        channels[transfer.sender, transfer.receiver, transfer.payload].append(transfer)
    posts: list[list[tuple[int, int, Receive]]] = [[] for _ in table.starts[1:]]
    for (sender, receiver, payload), channel in channels.items():
        first = table.starts[receiver]
        own_order = order[first : table.starts[receiver + 1]]
        channel.sort(key=lambda transfer: transfer.producer)
        bound = len(own_order)
        # From the last send to the first, so that no receive is posted after a later one's.
        for transfer in reversed(channel):
            in_order = int(np.searchsorted(own_order, order[transfer.producer]))
            bound = min(bound, in_order, max(transfer.consumer - first - 1, 0))
            receive = Receive(payload, transfer.stage, transfer.microbatch, sender)
            posts[receiver].append((bound, transfer.producer, receive))
    return sends, [_by_position(order, rank_posts) for rank_posts in posts]


def _by_position(
    order: IntArray, posts: list[tuple[int, int, Receive]]
) -> dict[int, list[Receive]]:
    """Receives by the position they are posted before, each list in the order of the sends."""
    result = defaultdict(list)
    for position, _, receive in sorted(posts, key=lambda p: (p[0], order[p[1]])):
        result[position].append(receive)
    return result


def _reductions_by_position(schedule: Schedule, rank: int) -> dict[int, list[ReduceGradients]]:
    result = defaultdict(list)
    for after, stage, update in reduction_points(schedule, rank):
        result[after].append(ReduceGradients(stage, update))
    return result


def _rank_steps(
    schedule: Schedule,
    rank: int,
    sends: dict[int, Send],
    receives: dict[int, list[Receive]],
    first: int,
) -> tuple[Step, ...]:
    reductions = _reductions_by_position(schedule, rank)
    # A rank without actions reduces, and so gives zeros, at position -1.
    steps: list[Step] = [*reductions.get(-1, ())]
    for position, action in enumerate(schedule.actions[rank]):
        steps.extend(receives.get(position, ()))
        steps.append(Compute(action))
        if first + position in sends:
            steps.append(sends[first + position])
        for reduction in reductions.get(position, ()):
            steps.append(reduction)
            if not schedule.is_synchronous:
                steps.append(OptimizerStep((reduction.stage,), reduction.update))
    if schedule.is_synchronous and schedule.has_backwards:
        steps.append(OptimizerStep(schedule.stages_of(rank), 0))
    return tuple(steps)
