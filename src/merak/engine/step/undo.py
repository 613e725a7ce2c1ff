"""Steps that must not have happened: their gradients, and what their forwards wrote into buffers.

A step that is not finite is undone by the host once it knows; or left out by the device, which need
not wait for it. Then the next step has run by the time that the host reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from merak.engine.oom_replan import restore
from merak.engine.state import EngineState
from merak.engine.step.optimizer_step import StepEnd, StepNumbers
from merak.engine.tensors_by_name import TensorDict


class StepUndo:
    """Buffers that the last steps have written, such as running means, as they were before."""

    def __init__(self) -> None:
        self._before: dict[int, TensorDict] = {}

    def note(self, step: int, written: TensorDict, with_previous: bool) -> None:
        """Record copies of the buffers that a step writes, at its beginning.

        Args:
            step: its number.
            written: copies of the buffers that it writes.
            with_previous: whether the step before may still have to be located.
        """
        previous = self._before.get(step - 1) if with_previous else None
        self._before = ({} if previous is None else {step - 1: previous}) | {step: written}

    def discard(self, state: EngineState, found: StepNumbers) -> None:
        """Undo the last step, which was not finite; an optimizer then changes nothing.

        Args:
            state: of the engine.
            found: at the step's end.
        """
        state.optimizer_params.clear_gradients()
        if state.reducer.compression is not None:
            state.reducer.compression.undo()  # the gradients that it reduced are not used
        if not found.has_finite_loss:  # the forward has written such numbers into buffers
            restore(state, self._last)

    @torch.no_grad()
    def mask(self, state: EngineState, end: StepEnd) -> None:
        """Undo the last step's writes on the device, where its losses are not finite.

        Args:
            state: of the engine.
            end: of the step.
        """
        for name, before in self._last.items():
            buffer = state.buffers[name]
            if buffer.shape == before.shape:
                buffer.copy_(torch.where(end.has_finite_loss, buffer, before))
            elif not end.read().has_finite_loss:  # it has grown in the step
                buffer.resize_as_(before).copy_(before)

    @contextmanager
    def before(self, state: EngineState, step: int) -> Iterator[None]:
        """Context in which buffers are as before one of the last two steps, without gradients.

        Args:
            state: of the engine, whose weights are still those of the step.
            step: its number; gradients of a later one are there again afterwards.
        """
        is_last = step == max(self._before)
        gradients = {} if is_last else state.optimizer_params.gradients()
        now = {name: state.buffers[name].clone() for name in self._before[step]}
        restore(state, self._before[step])
        try:
            yield
        finally:
            restore(state, now)
            state.optimizer_params.add_gradients(gradients)

    @property
    def _last(self) -> TensorDict:
        return self._before[max(self._before)]
