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
    partition into as many stages `forwards · forward_s + backwards · backward_s + transfers_s` is
    a lower bound of its iteration time.

    Args:
        iteration_s: the time from the first forward to the last backward.
        forwards: how many forwards of every stage lie on the path.
        backwards: how many backwards of every stage lie on it.
        transfers_s: time of the transfers on it.
    """

    iteration_s: float
    forwards: FloatArray
    backwards: FloatArray
    transfers_s: float


def critical_path(
    forward_s: FloatArray,
    backward_s: FloatArray,
    num_microbatches: int,
    transfer_s: float = 0.0,
) -> CriticalPath:
    """Time one iteration of 1F1B and find what it waits for.

    Args:
        forward_s: forward time of every stage for one microbatch, (stages,).
        backward_s: backward time of every stage for one microbatch, (stages,).
        num_microbatches: microbatches per iteration.
        transfer_s: from the end of an action until its output is on the neighbouring stage, which
            computes meanwhile.

    Source: AutoPipe (CLUSTER 2022), the recurrence over start times.
    """
    ends = _ends(forward_s, backward_s, num_microbatches, transfer_s)
    num_stages = len(forward_s)
    forwards, backwards = np.zeros(num_stages), np.zeros(num_stages)
    transfers_s = 0.0
    stage, level = 0, len(ends) - 2
    while level >= 0:
        if not _acts(stage, level, num_stages, num_microbatches):
            level -= 1
            continue
        forward = (level - stage) % 2 == 0
        (forwards if forward else backwards)[stage] += 1
        giver = stage - 1 if forward else stage + 1
        waits = 0 <= giver < num_stages and ends[level, giver] + transfer_s >= ends[level, stage]
        if waits:
            stage, transfers_s = giver, transfers_s + transfer_s
        level -= 1
    return CriticalPath(float(ends[-1, 0]), forwards, backwards, transfers_s)


def _acts(stage: int, level: int, num_stages: int, num_microbatches: int) -> bool:
    """Whether the stage has an action at this level (see `_ends`)."""
    offset = level - stage
    if offset % 2 == 0:
        return 0 <= offset // 2 < num_microbatches
    return 0 <= (level + stage + 1) // 2 - num_stages < num_microbatches


def _ends(
    forward_s: FloatArray, backward_s: FloatArray, num_microbatches: int, transfer_s: float
) -> FloatArray:
    """When every stage is done with its actions up to every level, (levels + 1, stages).

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
    for level in range(num_levels):
        before, after = ends[level], ends[level + 1]
        after[:] = before
        low = max(level % 2, level - 2 * (num_microbatches - 1))
        high = min(last, level) + 1
        if low == 0:
            after[0] += forward_s[0]
            low = 2
        if low < high:
            arrived = before[low - 1 : high - 1 : 2] + transfer_s
            after[low:high:2] = np.maximum(before[low:high:2], arrived) + forward_s[low:high:2]
        low = max((level + 1) % 2, 2 * num_stages - 1 - level)
        high = min(last, 2 * (num_microbatches + last) - 1 - level)
        if high == last and (last - level) % 2 and low <= last:
            after[last] += backward_s[last]
        high = min(high, last - 1) + 1
        if low < high:
            arrived = before[low + 1 : high + 1 : 2] + transfer_s
            after[low:high:2] = np.maximum(before[low:high:2], arrived) + backward_s[low:high:2]
    return ends
