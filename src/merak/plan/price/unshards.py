"""What a stage waits for parameters that ZeRO 3 gathers, and gradients that it reduces.

The parameters of a segment are gathered beside the one before, and its gradients reduced beside the
next backward, so that each segment hides what its neighbours send: a small one hides little of what
a large one needs. A segment that the action before has ended with is still gathered. Which
collectives there are is said by `merak.plan.memory.unshards`, and their order by the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from merak.plan.cost.calibration import PassSeconds
from merak.schedule.ir import GRADIENT_KINDS, Action, Kind, Schedule

Beside = Callable[[float, float], float]
"""Seconds that collectives add to the computation beside them."""


@dataclass(frozen=True, slots=True)
class Unshard:
    """A segment of a stage whose parameters are gathered, with what follows up to the next.

    Args:
        times: of its passes.
        gather_s: of its parameters.
        reduce_s: of their gradients.
    """

    times: PassSeconds
    gather_s: float
    reduce_s: float


def unshard_waits(
    unshards: Sequence[Unshard], schedule: Schedule, number: int, beside: Beside
) -> tuple[PassSeconds, float]:
    """Seconds that are added to a stage's passes, and to a step once.

    Once a step, the first gather and the last reduction are waited for.

    Args:
        unshards: of its forward, in order.
        schedule: with the actions of its rank.
        number: of the stage.
        beside: seconds that collectives add to computation beside them.
    """
    if not unshards:
        return PassSeconds(0.0, 0.0, 0.0, 0.0, 0.0), 0.0
    first, last = unshards[0], unshards[-1]
    forwards, backwards, is_apart = _gathered_anew(schedule, number, len(unshards) == 1)
    nexts = [own.gather_s for own in unshards[1:]]
    befores = [*(own.gather_s for own in reversed(unshards[:-1])), backwards * last.gather_s]
    # The last reduction of a backward is open in the next one; behind the last, nothing hides it.
    reductions = [first.reduce_s, *(own.reduce_s for own in reversed(unshards[1:]))]
    times = [own.times for own in reversed(unshards)]
    wholes = [own.backward_s + (0.0 if is_apart else own.recompute_s) for own in times]
    both = [gather_s + reduce_s for gather_s, reduce_s in zip(befores, reductions, strict=True)]
    passes = PassSeconds(
        _added(beside, [u.times.forward_s for u in unshards], [*nexts, 0.0])
        + forwards * beside(last.times.forward_s, first.gather_s),
        _added(beside, [u.times.recompute_s for u in unshards], [*nexts, first.gather_s]),
        _added(beside, wholes, both),
        _added(beside, [own.input_gradient_s for own in times], befores),
        _added(beside, [own.weight_gradient_s for own in times], reductions),
    )
    if schedule.splits_backwards:
        hidden_s = beside(times[0].weight_gradient_s, first.reduce_s)
    else:
        hidden_s = beside(wholes[0], both[0]) - beside(wholes[0], befores[0])
    return passes, first.gather_s + max(0.0, first.reduce_s - hidden_s)


def _added(beside: Beside, computes: Iterable[float], sent: Iterable[float]) -> float:
    return sum(beside(*own) for own in zip(computes, sent, strict=True))


def _gathered_anew(schedule: Schedule, number: int, is_single: bool) -> tuple[float, float, bool]:
    """Parts of a stage's forwards and backwards whose first segment is not gathered still.

    Also whether recomputations are actions of their own. The step's first action does not count.

    Args:
        schedule: with the actions of the stage's rank.
        number: of the stage.
        is_single: whether it has one segment, with which all of its actions begin and end.
    """
    actions = schedule.actions[schedule.ranks_of(number)[0]]
    counts, anew = {True: 0, False: 0}, {True: 0, False: 0}
    before: Action | None = None
    for action in actions:
        is_forward = action.kind is Kind.FORWARD
        if action.stage == number and (is_forward or action.kind in GRADIENT_KINDS):
            counts[is_forward] += 1
            follows = before is None or before.stage == number
            # Forwards end where backwards begin.
            meets = before is None or is_single or is_forward != (before.kind in _UPWARDS)
            anew[is_forward] += not (follows and meets)
        before = action
    is_apart = any(own.kind is Kind.RECOMPUTE and own.stage == number for own in actions)
    return anew[True] / max(1, counts[True]), anew[False] / max(1, counts[False]), is_apart


_UPWARDS = (Kind.FORWARD, Kind.RECOMPUTE)
"""Kinds of actions that end with a stage's last segment."""
