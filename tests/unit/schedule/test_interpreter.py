"""The interpreter of actions and steps, which the engine and the memory timeline share."""

from __future__ import annotations

import gc
import weakref

import pytest

from merak.schedule.interpreter import StepInterpreter
from merak.schedule.ir import FINAL_KINDS, GRADIENT_KINDS, Action
from merak.schedule.lower import lower
from merak.schedule.registry import build, names
from merak.schedule.steps import Compute, OptimizerStep, Receive, ReduceGradients, Send, Step


class Recorder(StepInterpreter):
    """Writes down everything that is called."""

    def __init__(self, name: str, rank: int) -> None:
        super().__init__(build(name, 4, 8), rank)
        self.performed: list[Action] = []
        self.prefetched: list[Action] = []
        self.others: list[Step] = []
        self.done: list[int] = []

    def note(self, action: Action) -> None:
        self.performed.append(action)

    def note_step(self, step: Send | Receive | ReduceGradients | OptimizerStep) -> None:
        self.others.append(step)

    forward = recompute = backward = input_gradient = weight_gradient = note
    send = receive = reduce = step_optimizer = note_step

    def prefetch(self, action: Action) -> None:
        self.prefetched.append(action)

    def microbatch_done(self, microbatch: int) -> None:
        self.done.append(microbatch)


@pytest.mark.parametrize("name", names())
def test_every_step_is_performed_once_and_in_order(name: str) -> None:
    for rank in range(4):
        recorder = Recorder(name, rank)
        steps = lower(recorder.schedule)[rank]
        recorder.run_steps(steps)
        own = recorder.schedule.actions[rank]
        assert tuple(recorder.performed) == own
        assert recorder.others == [step for step in steps if not isinstance(step, Compute)]
        assert recorder.prefetched == [a for a in own[1:] if a.kind in GRADIENT_KINDS]
        assert sorted(recorder.done) == sorted({a.microbatch for a in own})
        completing = [a for a in own if a.kind in FINAL_KINDS and recorder.completes_update(a)]
        updates = {(a.stage, recorder.schedule.update_of(a.microbatch)) for a in own}
        assert len(completing) == len(updates)


def test_a_kind_that_an_interpreter_lacks_is_refused() -> None:
    class Nothing(StepInterpreter):
        pass

    schedule = build("1f1b", 2, 2)
    with pytest.raises(NotImplementedError):
        Nothing(schedule, 0).run_steps(lower(schedule)[0])


def test_an_interpreter_is_freed_without_the_garbage_collector() -> None:
    """It holds tensors in the engine."""
    gc.disable()
    try:
        recorder = Recorder("1f1b", 0)
        recorder.run_steps(lower(recorder.schedule)[0])
        gone = weakref.ref(recorder)
        del recorder
        assert gone() is None
    finally:
        gc.enable()
