"""DualPipeV: the V-shaped half of DualPipe, with forwards and backwards of both stages in turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from merak.core.errors import ScheduleError
from merak.schedule.builders.common import check_counts, single_pipe, v_shape
from merak.schedule.ir import Action, Kind, Schedule


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Build DualPipeV.

    In its steady state every forward stands beside a backward of the rank's other stage, so that an
    engine may overlap one's communication with the other's computation. With equal stages, F = 1
    and I = W = 1 it takes 6M + P - 1, the least that P ranks can, and holds 2P + 1 activations.

    Args:
        num_ranks: pipeline degree P; rank r holds stages r and 2P - 1 - r.
        num_microbatches: microbatches per iteration, at least 2P.

    Raises:
        ScheduleError: there are less than 2P microbatches.

    Source: arXiv 2412.19437 (DeepSeek-V3), section 3.2.1, DualPipe, of which every rank pair's
        work is folded onto one rank.
    """
    check_dualpipe_v(num_ranks, num_microbatches)
    lists = [_rank_actions(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]
    ranks, flags = v_shape(num_ranks), [False] * 2 * num_ranks
    return single_pipe("dualpipe_v", ranks, lists, num_microbatches, flags)


def check_dualpipe_v(num_ranks: int, num_microbatches: int) -> None:
    """Refuse too few microbatches, as of `dualpipe_v`."""
    check_counts("dualpipe_v", num_ranks, num_microbatches)
    if num_microbatches < 2 * num_ranks:
        raise ScheduleError(
            f"dualpipe_v fills its warmup with two microbatches per rank and is defined for "
            f"{2 * num_ranks} microbatches or more on {num_ranks} ranks; got {num_microbatches}. "
            f"Use zero_bubble_v."
        )


def _rank_actions(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    """A rank's list; down is its stage on the way down the ranks, up the one on the way back."""
    above, here = num_ranks - rank - 1, rank + 1
    down, up = rank, 2 * num_ranks - 1 - rank
    forward = {stage: _numbered(Kind.FORWARD, stage) for stage in (down, up)}
    backward = {stage: _numbered(Kind.BACKWARD, stage) for stage in (down, up)}
    waiting: deque[Action] = deque()

    def split(stage: int) -> Action:
        """The I of a stage's next backward; its W waits."""
        microbatch = next(backward[stage]).microbatch
        waiting.append(Action(Kind.WEIGHT_GRADIENT, stage, microbatch))
        return Action(Kind.INPUT_GRADIENT, stage, microbatch)

    actions: list[Action] = [next(forward[down]) for _ in range(2 * above)]
    for _ in range(here):
        actions += [next(forward[down]), next(forward[up])]
    for _ in range(above):
        actions += [split(up), waiting.popleft(), next(forward[up])]
    for _ in range(num_microbatches - 2 * num_ranks + here):
        actions += [next(forward[down]), next(backward[up])]
        actions += [next(forward[up]), next(backward[down])]
    for _ in range(above):
        actions += [next(backward[up]), next(forward[up]), next(backward[down])]
    for number in range(2 * here):
        stage = (up, down)[number % 2]
        actions.append(next(backward[stage]) if number < here else split(stage))
    for _ in range(above):
        actions += [waiting.popleft(), split(down)]
    return (*actions, *waiting)


def _numbered(kind: Kind, stage: int) -> Iterator[Action]:
    microbatch = 0
    while True:
        yield Action(kind, stage, microbatch)
        microbatch += 1
