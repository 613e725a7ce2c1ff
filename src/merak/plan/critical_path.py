"""The iteration time of 1F1B, and its critical path."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """A longest chain of actions, each of which waits for the one before.

    The counts alone matter: the same chain exists whatever the stages hold, so for any other
    partition into as many stages `forwards · forward_s + backwards · backward_s + occupancies ·
    occupancy_s + transfers_s` is a lower bound of its iteration time.

    Args:
        iteration_s: the time from the first forward to the last backward.
        forwards: how many forwards of every stage lie on the path, (stages,).
        backwards: how many backwards of every stage lie on it, (stages,).
        occupancies: how many transfers over every boundary lie on it, (stages - 1,).
        transfers_s: time of those transfers' latencies.
    """

    iteration_s: float
    forwards: FloatArray
    backwards: FloatArray
    occupancies: FloatArray
    transfers_s: float


@dataclass(frozen=True, slots=True)
class _Clock:
    """Times by level, see `_run`. Rows: after that many levels; columns: stages.

    Args:
        ends: when each stage is done with its actions.
        forward_sent: when each stage's link to the next is done with activations.
        backward_sent: when each stage's link to the one before is done with gradients.
    """

    ends: FloatArray
    forward_sent: FloatArray
    backward_sent: FloatArray


def critical_path(
    forward_s: FloatArray,
    backward_s: FloatArray,
    num_microbatches: int,
    latency_s: float | FloatArray = 0.0,
    occupancy_s: FloatArray | None = None,
) -> CriticalPath:
    """Time one iteration of 1F1B and find what it waits for.

    A stage computes while what it sends travels.

    Args:
        forward_s: forward time of every stage for one microbatch, (stages,).
        backward_s: backward time of every stage for one microbatch, (stages,).
        num_microbatches: microbatches per iteration.
        latency_s: of a transfer over each boundary, or over any; transfers do not wait for one
            another's latency, (stages - 1,).
        occupancy_s: of a boundary's link by one transfer, during which the next one in the same
            direction waits; None for no time, (stages - 1,).

    Source: AutoPipe (CLUSTER 2022), the recurrence over start times.
    """
    num_stages = len(forward_s)
    latencies = np.broadcast_to(np.asarray(latency_s, dtype=np.float64), (num_stages - 1,))
    clock = _run(forward_s, backward_s, num_microbatches, latencies, occupancy_s)
    forwards, backwards = np.zeros(num_stages), np.zeros(num_stages)
    occupancies, transfers_s = np.zeros(num_stages - 1), 0.0
    stage, level = 0, len(clock.ends) - 2
    while level >= 0:
        if not _acts(stage, level, num_stages, num_microbatches):
            level -= 1
            continue
        forward = (level - stage) % 2 == 0
        (forwards if forward else backwards)[stage] += 1
        giver, sent = (
            (stage - 1, clock.forward_sent) if forward else (stage + 1, clock.backward_sent)
        )
        boundary = min(stage, giver)
        level -= 1
        if not (0 <= giver < num_stages):
            continue
        if sent[level + 1, giver] + latencies[boundary] >= clock.ends[level + 1, stage]:
            stage, transfers_s = giver, transfers_s + float(latencies[boundary])
            occupancies[boundary] += 1
            # Transfers wait for one another: a stage sends one at every second level.
            while sent[level, giver] > clock.ends[level + 1, giver]:
                occupancies[boundary] += 1
                level -= 2
    return CriticalPath(float(clock.ends[-1, 0]), forwards, backwards, occupancies, transfers_s)


def _acts(stage: int, level: int, num_stages: int, num_microbatches: int) -> bool:
    """Whether the stage has an action at this level (see `_run`)."""
    offset = level - stage
    if offset % 2 == 0:
        return 0 <= offset // 2 < num_microbatches
    return 0 <= (level + stage + 1) // 2 - num_stages < num_microbatches


def _run(
    forward_s: FloatArray,
    backward_s: FloatArray,
    num_microbatches: int,
    latency_s: FloatArray,
    occupancy_s: FloatArray | None,
) -> _Clock:
    """When every stage and link is done with its work up to every level, (levels + 1, stages).

    Let stage s run the forward of microbatch m at level s + 2m and its backward at level
    2 · stages - 1 - s + 2m. These levels keep the 1F1B order of every stage, and what an action
    waits for on its neighbour is that neighbour's action of the level before: so a row follows
    from the row before, all stages at once. At each level every other stage runs a forward, and
    the stages between them a backward, as far as there are microbatches.
    """
    num_stages = len(forward_s)
    last = num_stages - 1
    num_levels = 2 * (num_microbatches + last)
    ends = np.zeros((num_levels + 1, num_stages))
    # What takes no time on the link has left when it is computed.
    sent = (ends, ends) if occupancy_s is None else (np.zeros_like(ends), np.zeros_like(ends))
    clock = _Clock(ends, *sent)
    for level in range(num_levels):
        before, after = ends[level], ends[level + 1]
        after[:] = before
        low = max(level % 2, level - 2 * (num_microbatches - 1))
        high = min(last, level) + 1
        forwards = slice(low, high, 2)
        if low == 0:
            after[0] += forward_s[0]
            low = 2
        if low < high:
            arrived = clock.forward_sent[level, low - 1 : high - 1 : 2]
            arrived = arrived + latency_s[low - 1 : high - 1 : 2]
            after[low:high:2] = np.maximum(before[low:high:2], arrived) + forward_s[low:high:2]
        low = max((level + 1) % 2, 2 * num_stages - 1 - level)
        high = min(last, 2 * (num_microbatches + last) - 1 - level)
        backwards = slice(low, high + 1, 2)
        if high == last and (last - level) % 2 and low <= last:
            after[last] += backward_s[last]
        high = min(high, last - 1) + 1
        if low < high:
            arrived = clock.backward_sent[level, low + 1 : high + 1 : 2] + latency_s[low:high:2]
            after[low:high:2] = np.maximum(before[low:high:2], arrived) + backward_s[low:high:2]
        if occupancy_s is not None:
            _send(clock, level, forwards, backwards, occupancy_s)
    return clock


def _send(
    clock: _Clock, level: int, forwards: slice, backwards: slice, occupancy_s: FloatArray
) -> None:
    """Send what the stages that ran forwards and backwards at a level have computed."""
    ends = clock.ends[level + 1]
    for sent, own, seconds in (
        (clock.forward_sent, forwards, np.append(occupancy_s, 0.0)),
        (clock.backward_sent, backwards, np.insert(occupancy_s, 0, 0.0)),
    ):
        sent[level + 1] = sent[level]
        if own.start < own.stop:
            sent[level + 1, own] = np.maximum(sent[level, own], ends[own]) + seconds[own]
