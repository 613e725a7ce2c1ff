"""How many microbatches, activations and weight versions every rank holds, at most."""

from __future__ import annotations

from collections import Counter

import numpy as np

from merak.schedule.action_table import ActionTable, BoolArray, FloatArray, IntArray
from merak.schedule.costs import Costs
from merak.schedule.ir import FINAL_KINDS, Kind, Schedule


def has_own_recompute(schedule: Schedule, table: ActionTable) -> BoolArray:
    """Where an action's microbatch has an R of its own on the action's stage."""
    place = table.stage * schedule.num_microbatches + table.microbatch
    own = np.zeros(schedule.num_stages * schedule.num_microbatches, dtype=np.bool_)
    own[place[table.is_kind(Kind.RECOMPUTE)]] = True
    result: BoolArray = own[place]
    return result


def recomputes_inside(schedule: Schedule, table: ActionTable) -> BoolArray:
    """Where a B or I has to recompute first, because its stage saved its input only."""
    stage_recomputes = np.array(schedule.recompute, dtype=np.bool_)[table.stage]
    gradient = table.is_kind(Kind.BACKWARD, Kind.INPUT_GRADIENT)
    return gradient & stage_recomputes & ~has_own_recompute(schedule, table)


def in_flight(table: ActionTable) -> IntArray:
    """Microbatches in flight on an action's rank, over its stages, while the action runs."""
    ones = np.ones(table.num_actions, dtype=np.int64)
    gained = ones * table.is_kind(Kind.FORWARD)
    released = ones * table.is_kind(*FINAL_KINDS)
    return _levels(table, gained, released).astype(np.int64)


def activation_changes(
    schedule: Schedule, table: ActionTable, costs: Costs
) -> tuple[FloatArray, FloatArray]:
    """Bytes of activations that every action gains at its start, and those it releases at its end.

    A stage that recomputes saves its input only; recomputation restores the rest.
    """
    full = np.array(costs.activation_bytes)[table.stage]
    left = np.array(costs.weight_gradient_bytes)[table.stage]
    stage_recomputes = np.array(schedule.recompute, dtype=np.bool_)[table.stage]
    saved = np.where(stage_recomputes, np.array(costs.checkpoint_bytes)[table.stage], full)
    returns = table.is_kind(Kind.RECOMPUTE) | recomputes_inside(schedule, table)
    gained = np.where(table.is_kind(Kind.FORWARD), saved, 0.0) + np.where(
        returns, full - saved, 0.0
    )
    released = np.where(table.is_kind(Kind.BACKWARD), full, 0.0)
    released += np.where(table.is_kind(Kind.INPUT_GRADIENT), full - left, 0.0)
    released += np.where(table.is_kind(Kind.WEIGHT_GRADIENT), left, 0.0)
    return gained, released


def activation_bytes(schedule: Schedule, table: ActionTable, costs: Costs) -> FloatArray:
    """Bytes of activations on an action's rank while the action runs."""
    return _levels(table, *activation_changes(schedule, table, costs))


def peak_per_rank(table: ActionTable, level: FloatArray | IntArray) -> list[float]:
    """The highest level on every rank; 0 on one without actions."""
    return [
        float(level[first:stop].max()) if stop > first else 0.0
        for first, stop in zip(table.starts, table.starts[1:])
    ]


def num_weight_versions(schedule: Schedule) -> dict[tuple[int, int], int]:
    """Versions of a stage's weights that a rank holds at once, at most, by (rank, stage).

    Held are the newest version and those of all microbatches in flight.
    """
    result = {(r, s): 1 for r in range(schedule.num_ranks) for s in schedule.stages_of(r)}
    if schedule.is_synchronous:
        return result
    for rank, actions in enumerate(schedule.actions):
        live: dict[int, Counter[int]] = {s: Counter() for s in schedule.stages_of(rank)}
        finished: Counter[int] = Counter()
        for action in actions:
            stage = action.stage
            version = schedule.weight_version(stage, action.microbatch)
            if action.kind is Kind.FORWARD:
                live[stage][version] += 1
            elif action.kind in FINAL_KINDS:
                live[stage] -= Counter([version])
                finished[stage] += 1
            newest = finished[stage] // schedule.microbatches_per_update
            held = len(live[stage].keys() | {newest})
            result[rank, stage] = max(result[rank, stage], held)
    return result


def state_bytes(schedule: Schedule, costs: Costs) -> list[float]:
    """Bytes of weights, gradients, optimizer state and stashed versions on every rank."""
    result = [0.0] * schedule.num_ranks
    for (rank, stage), versions in num_weight_versions(schedule).items():
        result[rank] += costs.state_bytes[stage] + (versions - 1) * costs.weight_bytes[stage]
    return result


def _levels(
    table: ActionTable, gained: FloatArray | IntArray, released: FloatArray | IntArray
) -> FloatArray:
    """Activations of a rank during each action: gains count from its start, releases at its end."""
    total = np.cumsum(gained) - (np.cumsum(released) - released)
    before = np.concatenate(([0.0], np.cumsum(gained) - np.cumsum(released)))
    starts = np.array(table.starts[:-1])
    lengths = np.diff(np.array(table.starts))
    offset = np.repeat(before[starts], lengths)
    return np.asarray(total - offset, dtype=np.float64)
