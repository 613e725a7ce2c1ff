"""Partitions of segments into stages: the result of balancing, or the user's own list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from merak.core.errors import PlanError
from merak.schedule.ir import Schedule

MOST_OVER = 1.05
"""Peak of a pp rank ÷ its memory up to which segments are moved, so that the rank has it."""

_MOST_MOVES = 4
"""Moves that are tried, each of a segment off every rank that has too little memory."""


@dataclass(frozen=True, slots=True)
class Partition:
    """Consecutive segments per stage. Build with `balance`, `from_cuts` or `from_sizes`.

    Args:
        num_segments: segments of the model.
        cuts: the first segment of every stage but stage 0, increasing.
    """

    num_segments: int
    cuts: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.cuts) + 1

    @property
    def stages(self) -> tuple[range, ...]:
        """The segments of every stage."""
        return tuple(range(*ends) for ends in pairwise((0, *self.cuts, self.num_segments)))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of segments of every stage."""
        return tuple(len(stage) for stage in self.stages)

    def stage_of(self, segment: int) -> int:
        """The stage that holds a segment."""
        return sum(cut <= segment for cut in self.cuts)


def from_cuts(cuts: Sequence[int], num_segments: int) -> Partition:
    """The partition with the given first segments of stages 1, 2, ….

    Args:
        cuts: the first segment of every stage but stage 0; empty for one stage.
        num_segments: segments of the model.

    Raises:
        PlanError: the cuts do not increase, or lie outside 1 … num_segments - 1.
    """
    if not _are_integers(cuts):
        raise PlanError(f"The cuts {list(cuts)} are not all whole numbers; give segment positions.")
    if any(a >= b for a, b in pairwise(cuts)):
        raise PlanError(
            f"The cuts {list(cuts)} do not increase, so a stage would be empty; list the first "
            "segment of stages 1, 2, … in order."
        )
    outside = [cut for cut in cuts if not 1 <= cut < num_segments]
    if outside or num_segments < 1:
        raise PlanError(
            f"The cuts {list(cuts)} do not fit a model of {num_segments} segments; every cut lies "
            f"between 1 and {num_segments - 1}, for no stage may be empty."
        )
    return Partition(num_segments, tuple(cuts))


def from_sizes(sizes: Sequence[int], num_segments: int) -> Partition:
    """The partition with the given number of segments per stage.

    Args:
        sizes: segments of every stage, stage 0 first.
        num_segments: segments of the model, which the sizes add up to.

    Raises:
        PlanError: a size below 1, or sizes that do not add up to the model's segments.
    """
    if not sizes or not _are_integers(sizes) or min(sizes) < 1:
        raise PlanError(
            f"The segments per stage {list(sizes)} leave a stage empty; give every stage a whole "
            "number of 1 or more."
        )
    if sum(sizes) != num_segments:
        raise PlanError(
            f"The segments per stage {list(sizes)} add up to {sum(sizes)}, but the model has "
            f"{num_segments} segments; make them add up to {num_segments}."
        )
    return from_cuts(tuple(accumulate(sizes))[:-1], num_segments)


def move_to_fit(
    partition: Partition, schedule: Schedule, filled: Callable[[Partition], Sequence[float]]
) -> Partition | None:
    """Move segments from pp ranks whose memory is too small to those with more room.

    Stages between the two keep their number of segments, and have others.

    Args:
        partition: one that does not fit.
        schedule: which ranks have which stages.
        filled: peak of every pp rank ÷ its memory.

    Returns:
        One with which every rank has its memory; None where none was found, since a rank has too
        little by more than `MOST_OVER`, or there is no room.
    """
    of_ranks = filled(partition)
    for _ in range(_MOST_MOVES):
        if max(of_ranks) > MOST_OVER:
            return None
        sizes = list(partition.sizes)
        fullest = sorted(range(len(of_ranks)), key=lambda rank: -of_ranks[rank])
        for giver, taker in zip(fullest, fullest[::-1]):
            if of_ranks[giver] > 1.0 > of_ranks[taker]:
                sizes[max(schedule.stages_of(giver), key=sizes.__getitem__)] -= 1
                sizes[min(schedule.stages_of(taker), key=sizes.__getitem__)] += 1
        if min(sizes) < 1 or tuple(sizes) == partition.sizes:
            return None
        partition = from_sizes(sizes, partition.num_segments)
        of_ranks = filled(partition)
        if max(of_ranks) <= 1.0:
            return partition
    return None


def _are_integers(numbers: Sequence[int]) -> bool:
    return all(isinstance(number, int) and not isinstance(number, bool) for number in numbers)
