"""What ZeRO 3 exchanges is priced in the order in which the engine gathers and reduces."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

from merak.engine.zero import unshard_order
from merak.plan.cost.calibration import PassSeconds
from merak.plan.price.unshards import Unshard, unshard_waits
from merak.schedule import registry
from merak.schedule.ir import Kind, Schedule


@dataclass(frozen=True)
class _Group:
    """Parameters of a segment, as the order of unshards reads them."""

    number: int
    trains: bool = True


def _unshard(
    forward_s: float, recompute_s: float, backward_s: float, gather_s: float, reduce_s: float
) -> Unshard:
    times = PassSeconds(forward_s, recompute_s, backward_s, backward_s / 2, backward_s / 2)
    return Unshard(times, gather_s, reduce_s)


def _drawn(count: int) -> list[Unshard]:
    draw = random.Random(count)
    return [_unshard(*(draw.uniform(1.0, 9.0) for _ in range(5))) for _ in range(count)]


def _sent_s(unshards: list[Unshard], schedule: Schedule, stage: int) -> float:
    """Seconds of all collectives that the engine begins for a stage, by its own order."""
    nobody: Any = None  # waits
    order = unshard_order.UnshardOrder(nobody)
    groups: list[Any] = [_Group(number) for number in range(len(unshards))]
    order.start(
        unshard_order.Unshard((group,), (group,) if action.kind is Kind.BACKWARD else ())
        for action in schedule.actions[schedule.rank_of(stage, 0)]
        for group in (groups if action.kind is not Kind.BACKWARD else groups[::-1])
    )
    return sum(
        unshards[own.group.number].reduce_s  # type: ignore[attr-defined]
        if own.is_reduction
        else unshards[own.group.number].gather_s  # type: ignore[attr-defined]
        for own in order._collectives
    )


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("num_stages", "stage"), [(1, 0), (3, 0), (3, 2)])
@pytest.mark.parametrize("num_segments", [1, 2, 5])
def test_where_nothing_is_hidden_all_collectives_of_the_engine_are_waited_for(
    name: str, num_stages: int, stage: int, num_segments: int
) -> None:
    schedule = registry.build(name, num_stages, 6)
    unshards = _drawn(num_segments)
    waits, once_s = unshard_waits(unshards, schedule, stage, lambda computes_s, sent_s: sent_s)
    total_s = 6 * (waits.forward_s + waits.backward_s) + once_s
    assert total_s == pytest.approx(_sent_s(unshards, schedule, stage))


def test_a_small_segment_hides_little_of_what_a_large_one_needs() -> None:
    schedule = registry.build("1f1b", 1, 4)
    equal = [_unshard(2.0, 0.0, 4.0, 1.0, 1.0)] * 4
    unequal = [_unshard(4.0 * (n % 2), 0.0, 4.0, 1.0, 1.0) for n in range(4)]

    def beside(computes_s: float, sent_s: float) -> float:
        return max(0.0, sent_s - computes_s)

    assert unshard_waits(equal, schedule, 0, beside)[0].forward_s == 0.0
    assert unshard_waits(unequal, schedule, 0, beside)[0].forward_s == 2.0


def test_the_last_reduction_of_a_step_alone_is_not_hidden() -> None:
    schedule = registry.build("1f1b", 1, 4)
    unshards = [_unshard(5.0, 0.0, 5.0, 0.0, 2.0)] * 3
    waits, once_s = unshard_waits(
        unshards, schedule, 0, lambda own_s, sent_s: max(0.0, sent_s - own_s)
    )
    assert (waits.forward_s, waits.backward_s, once_s) == (0.0, 0.0, 2.0)


@pytest.mark.parametrize("is_apart", [False, True])
def test_a_recomputation_in_a_backward_gathers_nothing_again(is_apart: bool) -> None:
    """It runs just before the backward of its segment, and hides what that sends.

    One that is an action of its own ends with the segment with which the backward begins.
    """
    name = "early_recompute" if is_apart else "1f1b"
    schedule = registry.build(name, 2, 4)
    unshards = [_unshard(1.0, 1.0, 1.0, 2.0, 0.0)] * 3
    waits, _ = unshard_waits(unshards, schedule, 0, lambda own_s, sent_s: max(0.0, sent_s - own_s))
    assert waits.backward_s == (2.0 if is_apart else 0.0)
    assert waits.recompute_s == 3.0
