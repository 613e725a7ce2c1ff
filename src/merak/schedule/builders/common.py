"""Helpers of the builders: constructors of actions, checks of arguments, and assembly."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Sequence

from merak.core.errors import ScheduleError
from merak.schedule.ir import Action, Kind, Schedule


def forwards(stage: int, microbatches: Iterable[int]) -> list[Action]:
    """The forwards of some microbatches on a stage."""
    return [Action(Kind.FORWARD, stage, m) for m in microbatches]


def backwards(stage: int, microbatches: Iterable[int]) -> list[Action]:
    """The whole backwards of some microbatches on a stage."""
    return [Action(Kind.BACKWARD, stage, m) for m in microbatches]


def check_counts(name: str, num_ranks: int, num_microbatches: int) -> None:
    """Refuse a pipeline without ranks or without microbatches.

    Raises:
        ScheduleError: a count is below 1.
    """
    if num_ranks < 1:
        raise ScheduleError(f"{name} needs at least 1 stage; got {num_ranks}.")
    if num_microbatches < 1:
        raise ScheduleError(f"{name} needs at least 1 microbatch; got {num_microbatches}.")


def straight(
    name: str,
    actions: Iterable[Sequence[Action]],
    num_microbatches: int,
    recompute: Sequence[bool],
) -> Schedule:
    """A synchronous schedule of one pipe whose rank i holds stage i."""
    lists = tuple(tuple(rank_actions) for rank_actions in actions)
    return single_pipe(name, range(len(lists)), lists, num_microbatches, recompute)


def single_pipe(
    name: str,
    stage_ranks: Iterable[int],
    actions: Iterable[Sequence[Action]],
    num_microbatches: int,
    recompute: Sequence[bool],
    notes: Sequence[str] = (),
) -> Schedule:
    """A synchronous schedule of one pipe, with the rank of every stage given."""
    pipe = tuple(stage_ranks)
    return Schedule(
        name=name,
        pipes=(pipe,),
        microbatch_pipes=(0,) * num_microbatches,
        actions=tuple(tuple(rank_actions) for rank_actions in actions),
        recompute=tuple(recompute),
        eager_reduction=(True,) * len(pipe),
        microbatches_per_update=num_microbatches,
        notes=tuple(notes),
    )


def recompute_early(actions: Iterable[Action], microbatches: Container[int]) -> list[Action]:
    """Put an R right before the backward of some microbatches.

    The R needs no gradient, so it runs while the rank waits for one; and since nothing comes
    between the two, the rank never holds more activations than with a recomputation inside.
    """
    result = []
    for action in actions:
        if action.kind is Kind.BACKWARD and action.microbatch in microbatches:
            result.append(Action(Kind.RECOMPUTE, action.stage, action.microbatch))
        result.append(action)
    return result


def split_backwards(actions: Iterable[Action], delay: int) -> list[Action]:
    """Replace every B by an I, and put its W after the I of `delay` backwards later."""
    result: list[Action] = []
    waiting: deque[Action] = deque()
    for action in actions:
        if action.kind is not Kind.BACKWARD:
            result.append(action)
            continue
        result.append(Action(Kind.INPUT_GRADIENT, action.stage, action.microbatch))
        waiting.append(Action(Kind.WEIGHT_GRADIENT, action.stage, action.microbatch))
        if len(waiting) > delay:
            result.append(waiting.popleft())
    return [*result, *waiting]


def v_shape(num_ranks: int) -> tuple[int, ...]:
    """The rank of each of 2P stages laid down the ranks and back up: r holds r and 2P - 1 - r."""
    return (*range(num_ranks), *reversed(range(num_ranks)))
