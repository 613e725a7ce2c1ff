"""The action table: a schedule's actions as flat arrays, each with the action it depends on."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from merak.schedule.ir import Kind, Schedule

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]

NONE = -1
"""The index that stands for no action."""


@dataclass(frozen=True, slots=True)
class ActionTable:
    """Table of a schedule's actions, rank after rank, in list order.

    `source[i]` is the action on a neighbouring stage whose output action i takes: the previous
    stage's forward, or the next stage's input gradient; NONE where there is no such action.
    """

    # Actions of rank r are starts[r] up to starts[r + 1].
    starts: tuple[int, ...]
    rank: IntArray
    # ord() of the kind's letter.
    kind: IntArray
    stage: IntArray
    microbatch: IntArray
    source: IntArray
    # Whether the source is on another rank, so that its output must be transferred.
    crosses: BoolArray

    @property
    def num_actions(self) -> int:
        """Actions of all ranks together."""
        return len(self.kind)

    def is_kind(self, *kinds: Kind) -> BoolArray:
        """Boolean mask of the actions of some kinds."""
        result = np.zeros(self.num_actions, dtype=np.bool_)
        for kind in kinds:
            result |= self.kind == ord(kind.value)
        return result


def tabulate(schedule: Schedule) -> ActionTable:
    """Table of a schedule's actions; those out of its ranges have no source."""
    lengths = [len(actions) for actions in schedule.actions]
    every = list(chain.from_iterable(schedule.actions))
    letters = "".join(map(attrgetter("kind._value_"), every))
    kind = np.frombuffer(letters.encode("ascii"), dtype=np.uint8).astype(np.int64)
    stage = np.fromiter(map(attrgetter("stage"), every), dtype=np.int64, count=len(every))
    microbatch = np.fromiter(map(attrgetter("microbatch"), every), dtype=np.int64, count=len(every))
    rank = np.repeat(np.arange(len(lengths)), lengths)
    source = _sources(kind, stage, microbatch, schedule.num_stages, schedule.num_microbatches)
    return ActionTable(
        starts=tuple(int(start) for start in np.concatenate(([0], np.cumsum(lengths)))),
        rank=rank,
        kind=kind,
        stage=stage,
        microbatch=microbatch,
        source=source,
        crosses=(source != NONE) & (rank[source] != rank),
    )


def _sources(
    kind: IntArray, stage: IntArray, microbatch: IntArray, num_stages: int, num_microbatches: int
) -> IntArray:
    """The index of each action's source, or NONE."""
    legal = (stage >= 0) & (stage < num_stages) & (microbatch >= 0)
    legal &= microbatch < num_microbatches
    place = stage * num_microbatches + microbatch
    source = np.full(len(kind), NONE, dtype=np.int64)
    gradient = (kind == ord("B")) | (kind == ord("I"))
    for member, neighbour in ((kind == ord("F"), -1), (gradient, 1)):
        producer = np.full(num_stages * num_microbatches, NONE, dtype=np.int64)
        indices = np.flatnonzero(member & legal)
        producer[place[indices]] = indices
        other = stage[indices] + neighbour
        indices = indices[(other >= 0) & (other < num_stages)]
        source[indices] = producer[place[indices] + neighbour * num_microbatches]
    return source
