"""The interpreter of a rank's actions and steps: a method for each kind of them.

The engine interprets steps with tensors, the memory timeline with bytes, and the estimate of
offloading with seconds; a subclass has the methods of the kinds that its schedules contain. (The
simulator works on arrays of all actions at once, `merak.schedule.action_table`: a method call for
each of a million actions would take seconds.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

from merak.schedule.ir import FINAL_KINDS, GRADIENT_KINDS, Action, Kind, Schedule
from merak.schedule.steps import Compute, OptimizerStep, Receive, ReduceGradients, Send, Step


class ActionInterpreter:
    """Performs a rank's actions, each by the method of its kind.

    Args:
        actions: of the rank, in order.
    """

    # Functions of the class, not bound methods: those would keep `self` alive in a cycle.
    _by_kind: ClassVar[Mapping[Kind, Callable[[Any, Action], None]]]

    def __init_subclass__(cls) -> None:
        """Look the methods of the kinds up once for each class."""
        super().__init_subclass__()
        cls._by_kind = {
            Kind.FORWARD: cls.forward,
            Kind.RECOMPUTE: cls.recompute,
            Kind.BACKWARD: cls.backward,
            Kind.INPUT_GRADIENT: cls.input_gradient,
            Kind.WEIGHT_GRADIENT: cls.weight_gradient,
        }

    def __init__(self, actions: Sequence[Action]) -> None:
        self._following = dict(pairwise(actions))

    def perform(self, action: Action) -> None:
        """Prefetch for the action that follows, and perform this one."""
        self.prefetch_following(action)
        self._by_kind[action.kind](self, action)

    def prefetch_following(self, action: Action) -> None:
        """Begin to fetch offloaded activations, if a backward follows an action."""
        following = self._following.get(action)
        if following is not None and following.kind in GRADIENT_KINDS:
            self.prefetch(following)

    def prefetch(self, action: Action) -> None:
        """Begin to fetch the offloaded activations that a backward reads first; here none."""

    def forward(self, action: Action) -> None:
        """Run the forward of a stage and microbatch."""
        raise NotImplementedError

    def recompute(self, action: Action) -> None:
        """Recompute the activations of a stage and microbatch."""
        raise NotImplementedError

    def backward(self, action: Action) -> None:
        """Run the whole backward of a stage and microbatch."""
        raise NotImplementedError

    def input_gradient(self, action: Action) -> None:
        """Run the backward without the gradients of weights."""
        raise NotImplementedError

    def weight_gradient(self, action: Action) -> None:
        """Compute the gradients of weights that the backward has left out."""
        raise NotImplementedError


class StepInterpreter(ActionInterpreter):
    """Runs a rank's steps, each by the method of its type.

    Args:
        schedule: what the steps were lowered from.
        rank: the pp rank.
    """

    _by_step: ClassVar[Mapping[type[Any], Callable[[Any, Any], None]]]

    def __init_subclass__(cls) -> None:
        """Look the methods of the types up once for each class."""
        super().__init_subclass__()
        cls._by_step = {
            Compute: cls.compute,
            Send: cls.send,
            Receive: cls.receive,
            ReduceGradients: cls.reduce,
            OptimizerStep: cls.step_optimizer,
        }

    def __init__(self, schedule: Schedule, rank: int) -> None:
        own = schedule.actions[rank]
        super().__init__(own)
        self.schedule = schedule
        self.rank = rank
        finals = [action for action in own if action.kind in FINAL_KINDS]
        # The action that completes a stage's gradients of an update, and per microbatch how many
        # of this rank's stages have not yet completed its gradients.
        self._last = {(a.stage, schedule.update_of(a.microbatch)): a for a in finals}
        self._stages_left = Counter(action.microbatch for action in finals)

    def run_steps(self, steps: Iterable[Step]) -> None:
        """Run steps in order."""
        handlers = self._by_step
        for step in steps:
            handlers[type(step)](self, step)

    def compute(self, step: Compute) -> None:
        """Perform an action, and complete its microbatch if it is the last of this rank's."""
        self.perform(step.action)
        if step.action.kind in FINAL_KINDS:
            self.complete(step.action)

    def complete(self, action: Action) -> None:
        """Count a stage's gradients of a microbatch as complete."""
        self._stages_left[action.microbatch] -= 1
        if not self._stages_left[action.microbatch]:
            self.microbatch_done(action.microbatch)

    def completes_update(self, action: Action) -> bool:
        """Whether an action completes its stage's gradients of an update."""
        return self._last[action.stage, self.schedule.update_of(action.microbatch)] == action

    def microbatch_done(self, microbatch: int) -> None:
        """Release the values of a microbatch that this rank reads no more; here none."""

    def send(self, step: Send) -> None:
        """Send the output of an action."""
        raise NotImplementedError

    def receive(self, step: Receive) -> None:
        """Post a receive."""
        raise NotImplementedError

    def reduce(self, step: ReduceGradients) -> None:
        """Start the reduction of a stage's gradients."""
        raise NotImplementedError

    def step_optimizer(self, step: OptimizerStep) -> None:
        """Step the optimizer for some stages."""
        raise NotImplementedError
