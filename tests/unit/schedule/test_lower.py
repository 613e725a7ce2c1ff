"""Lowering, and the rules for lowered steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from merak.core.errors import ScheduleError
from merak.schedule.catalog import FORMULAS
from merak.schedule.ir import Schedule
from merak.schedule.lower import lower
from merak.schedule.registry import build
from merak.schedule.steps import (
    Compute,
    OptimizerStep,
    Payload,
    Receive,
    ReduceGradients,
    Send,
    Step,
)
from merak.schedule.validate.steps import check_steps

Lists = list[list[Step]]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(FORMULAS)), st.integers(1, 9), st.integers(1, 20))
def test_steps_of_every_schedule_are_right(
    name: str, num_ranks: int, num_microbatches: int
) -> None:
    try:
        schedule = build(name, num_ranks, num_microbatches)
    except ScheduleError:
        assume(False)
    steps = lower(schedule)
    assert check_steps(schedule, steps) == ()
    computed = tuple(tuple(s.action for s in own if isinstance(s, Compute)) for own in steps)
    assert computed == schedule.actions


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["1f1b", "chimera", "zero_bubble_v", "interleaved_1f1b"]), st.data())
def test_valid_orders_of_ones_own_have_right_steps(name: str, data: st.DataObject) -> None:
    """Any order that a greedy walk finds: with in-order sends, receives must follow."""
    schedule = _shuffled(build(name, 4, 8), data.draw(st.randoms(use_true_random=False)))
    assert check_steps(schedule, lower(schedule)) == ()


def _shuffled(schedule: Schedule, draw) -> Schedule:
    """The schedule's actions in a random order that respects the data flow."""
    left = [set(actions) for actions in schedule.actions]
    lists: list[list] = [[] for _ in left]
    done = set()

    def needs(action):
        same = lambda kind, stage: (kind, stage, action.microbatch)  # noqa: E731
        letter = action.kind.value
        if letter == "F":
            return [same("F", action.stage - 1)] if action.stage else []
        if letter == "W":
            return [same("I", action.stage)]
        last = action.stage == schedule.num_stages - 1
        above = [] if last else [same(letter, action.stage + 1)]
        return [same("F", action.stage), *above]

    while any(left):
        ready = [
            (rank, action)
            for rank, own in enumerate(left)
            for action in sorted(own, key=str)
            if all(need in done for need in needs(action))
        ]
        rank, action = draw.choice(ready)
        left[rank].remove(action)
        lists[rank].append(action)
        done.add((action.kind.value, action.stage, action.microbatch))
    return replace(schedule, actions=tuple(map(tuple, lists)))


def test_1f1b_on_two_ranks() -> None:
    show = {
        Compute: lambda s: s.action.short,
        Send: lambda s: f"send({s.payload.value[0]}{s.microbatch}→{s.peer})",
        Receive: lambda s: f"receive({s.payload.value[0]}{s.microbatch}←{s.peer})",
        ReduceGradients: lambda s: f"reduce({s.stage})",
        OptimizerStep: lambda s: f"step{s.stages}",
    }
    lines = [" ".join(show[type(s)](s) for s in own) for own in lower(build("1f1b", 2, 3))]
    assert lines == [
        "F0 send(a0→1) receive(g0←1) F1 send(a1→1) B0 receive(g1←1) F2 send(a2→1) receive(g2←1) "
        "B1 B2 reduce(0) step(0,)",
        "receive(a0←0) receive(a1←0) F0 B0 send(g0→0) F1 receive(a2←0) B1 send(g1→0) F2 B2 "
        "send(g2→0) reduce(1) step(1,)",
    ]


def test_receives_are_posted_at_least_one_action_ahead() -> None:
    for name in FORMULAS:
        for own in lower(build(name, 4, 8)):
            places = {
                (step.payload, step.stage, step.microbatch): place
                for place, step in enumerate(own)
                if isinstance(step, Receive)
            }
            computed = [place for place, step in enumerate(own) if isinstance(step, Compute)]
            for before, place in itertools.pairwise([-1, *computed]):
                action = own[place].action
                source = {
                    "F": (Payload.ACTIVATION, action.stage - 1),
                    "B": (Payload.GRADIENT, action.stage + 1),
                    "I": (Payload.GRADIENT, action.stage + 1),
                }.get(action.kind.value)
                if source is not None and (*source, action.microbatch) in places:
                    post = places.pop((*source, action.microbatch))
                    assert post < before or place == computed[0]
            assert not places


def test_neighbouring_stages_on_one_rank_transfer_nothing() -> None:
    steps = lower(build("zero_bubble_v", 2, 4))
    crossings = {(s.stage, s.payload) for own in steps for s in own if isinstance(s, Send)}
    # Stages 0 | 1 2 | 3 on ranks 0, 1, 0: only 0-1 and 2-3 cross.
    assert crossings == {
        (0, Payload.ACTIVATION),
        (2, Payload.ACTIVATION),
        (1, Payload.GRADIENT),
        (3, Payload.GRADIENT),
    }


def test_eager_reductions_stand_right_after_the_last_backward() -> None:
    first = lower(build("chimera", 4, 4))[0]
    kinds = [
        step.action if isinstance(step, Compute) else step
        for step in first
        if isinstance(step, Compute | ReduceGradients | OptimizerStep)
    ]
    shown = [str(k) for k in kinds]
    assert shown[5:7] == ["3B3", str(ReduceGradients(3, 0))]
    assert shown[-2:] == [str(ReduceGradients(0, 0)), str(OptimizerStep((0, 3), 0))]
    # The middle stage 2 waits for the rank's last action.
    second = [s for s in lower(build("chimera", 4, 4))[1] if not isinstance(s, Send | Receive)]
    assert [type(s) for s in second[-3:]] == [ReduceGradients, ReduceGradients, OptimizerStep]


def test_asynchronous_updates_follow_their_last_backward() -> None:
    own = [s for s in lower(build("pipedream", 2, 3))[1] if not isinstance(s, Send | Receive)]
    updates = [s.update for s in own if isinstance(s, OptimizerStep)]
    assert updates == [0, 1, 2]
    for before, step in itertools.pairwise(own):
        if isinstance(step, OptimizerStep):
            assert before == ReduceGradients(1, step.update)


def test_a_replica_without_microbatches_reduces_too() -> None:
    steps = lower(build("chimera", 4, 1))
    assert all(len([s for s in own if isinstance(s, ReduceGradients)]) == 2 for own in steps)


def _drop(lists: Lists, rank: int, kind: type) -> None:
    lists[rank].remove(next(step for step in lists[rank] if isinstance(step, kind)))


def _swap_receives(lists: Lists) -> None:
    places = [i for i, step in enumerate(lists[1]) if isinstance(step, Receive)][:2]
    a, b = places
    lists[1][a], lists[1][b] = lists[1][b], lists[1][a]


def _receive_late(lists: Lists) -> None:
    """Post rank 0's first gradient only where rank 1 already waits to send it."""
    receive = next(step for step in lists[0] if isinstance(step, Receive))
    lists[0].remove(receive)
    last = max(i for i, step in enumerate(lists[0]) if isinstance(step, Send))
    lists[0].insert(last + 1, receive)


def _reduce_early(lists: Lists) -> None:
    reduction = next(step for step in lists[0] if isinstance(step, ReduceGradients))
    lists[0].remove(reduction)
    lists[0].insert(0, reduction)


def _step_early(lists: Lists) -> None:
    lists[0].insert(0, lists[0].pop())


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda lists: _drop(lists, 0, Send), "activation 0 from rank 0 to rank 1 is sent as"),
        (lambda lists: _drop(lists, 1, Receive), "F0 of rank 1 runs before its activation is"),
        (
            _swap_receives,
            "activation 0 from rank 0 to rank 1 is sent as (stage, microbatch) (0, 0)",
        ),
        (_receive_late, "if every send waits for its receive, rank 0 hangs at step"),
        (lambda lists: _drop(lists, 0, ReduceGradients), "stage 0 in update 0 0 times."),
        (_reduce_early, "B0 of rank 0 comes after its gradients have been reduced."),
        (_step_early, "rank 0 steps stage 0 before its gradients are reduced."),
    ],
)
def test_damaged_steps_are_found(damage: Callable[[Lists], None], sentence: str) -> None:
    schedule = build("1f1b", 2, 4)
    lists = [list(own) for own in lower(schedule)]
    damage(lists)
    problems = check_steps(schedule, lists)
    assert any(sentence in problem for problem in problems), problems


def test_reductions_in_two_orders_are_found() -> None:
    schedule = build("chimera", 2, 2)
    lists = [list(own) for own in lower(schedule)]
    places = [i for i, step in enumerate(lists[0]) if isinstance(step, ReduceGradients)]
    a, b = places
    lists[0][a], lists[0][b] = lists[0][b], lists[0][a]
    problems = check_steps(schedule, lists)
    assert any("ranks 0 and 1 share stages and reduce them in different" in p for p in problems)
