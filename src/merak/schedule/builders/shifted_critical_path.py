"""The shifted critical path: stage P - 1 saves its activations, and P - 2 sets the pace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from merak.core.errors import ScheduleError
from merak.schedule.builders.common import (
    backwards,
    check_counts,
    forwards,
    recompute_early,
    straight,
)
from merak.schedule.builders.last_no_recompute import last_no_recompute
from merak.schedule.builders.one_f_one_b import one_f_one_b_actions
from merak.schedule.ir import Action, Schedule


def shifted_critical_path(
    num_ranks: int, num_microbatches: int, *, early_everywhere: bool = False
) -> Schedule:
    """Build Merak's shifted critical path schedule.

    Stage P - 2 runs one more forward in its warmup, which fills the wait for its first gradient,
    and recomputes its first two microbatches early. With equal stages and F = R = 1, B = 2 it takes
    4M + 3(P - 2), which no schedule whose stage P - 2 recomputes can beat.

    Args:
        num_ranks: pipeline degree, one stage per rank; at least 2.
        num_microbatches: microbatches per iteration. Below max(4, P) the nearest valid schedule,
            last_no_recompute, is built instead, and its notes say so.
        early_everywhere: recompute every microbatch early, not only where equal stages would wait
            for a gradient. Better where gradients come late: a long head on the last stage, slow
            transfers. It costs no memory.

    Raises:
        ScheduleError: there are less than 2 stages, or no microbatches.

    Source: arXiv 2206.04959 (Merak), section 5.1 and figure 3c.
    """
    check_counts("shifted_critical_path", num_ranks, num_microbatches)
    if num_ranks < 2:
        raise ScheduleError(
            f"shifted_critical_path moves work off the last of several stages and needs at least 2;"
            f" got {num_ranks}. Use 1f1b."
        )
    needed = max(4, num_ranks)
    if num_microbatches < needed:
        note = (
            f"shifted_critical_path needs {needed} microbatches or more with {num_ranks} stages; "
            f"with {num_microbatches} this is last_no_recompute."
        )
        return replace(last_no_recompute(num_ranks, num_microbatches), notes=(note,))
    lists = [
        _rank_actions(stage, num_ranks, num_microbatches, early_everywhere)
        for stage in range(num_ranks)
    ]
    recompute = [True] * (num_ranks - 1) + [False]
    return straight("shifted_critical_path", lists, num_microbatches, recompute)


def _rank_actions(
    stage: int, num_ranks: int, num_microbatches: int, early_everywhere: bool
) -> Sequence[Action]:
    if stage == num_ranks - 1:
        return one_f_one_b_actions(stage, 1, num_microbatches)
    every = range(num_microbatches)
    if stage == num_ranks - 2:
        actions, early = _penultimate_actions(stage, num_microbatches), {0, 1}
    else:
        actions = one_f_one_b_actions(stage, num_ranks - stage, num_microbatches)
        # In cooldown every rank waits; before it, equal stages make only P - 3 wait, once.
        cooldown = every[num_microbatches - (num_ranks - stage - 1) :]
        early = {*cooldown, 0} if stage == num_ranks - 3 else {*cooldown}
    return recompute_early(actions, every if early_everywhere else early)


def _penultimate_actions(stage: int, num_microbatches: int) -> tuple[Action, ...]:
    forward = forwards(stage, range(num_microbatches))
    backward = backwards(stage, range(num_microbatches))
    warmup, rest = forward[:3], forward[3:]
    # The third forward took the place of the one between the first two backwards.
    shifted, remaining = backward[:2], backward[2:]
    steady = [action for pair in zip(rest, remaining) for action in pair]
    cooldown = remaining[len(rest) :]
    return (*warmup, *shifted, *steady, *cooldown)
