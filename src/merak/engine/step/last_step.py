"""The last training step, until the host knows whether it was finite.

A device that leaves such a step out by itself is not waited for: the host reads its numbers while
the next step runs. Any other step is read at once, and undone by the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from merak.engine.step.optimizer_step import StepEnd, StepNumbers


class Discards(Protocol):
    """An engine, as far as it leaves steps out."""

    def mask_step(self, end: StepEnd) -> None:
        """Mask a step on the device where it is not finite."""

    def discard_step(self, found: StepNumbers) -> None:
        """Undo the last training step, which was not finite."""


@dataclass(frozen=True, slots=True)
class OpenStep:
    """A training step of which the host does not know yet whether it was finite.

    Args:
        number: of the step.
        end: of the step.
        locate: finds where it was first not finite: the end of a sentence; all ranks call it.
        is_masked: whether the device leaves it out by itself; the next step has then run as well.
    """

    number: int
    end: StepEnd
    locate: Callable[[], str]
    is_masked: bool


class LastStep:
    """The last training step of an engine.

    Args:
        skips: tells of a step, by the numbers at its end, whether it is left out; equal on all
            ranks. It raises where training stops.
    """

    def __init__(self, skips: Callable[[OpenStep, StepNumbers], bool]) -> None:
        self._skips = skips
        self._open: OpenStep | None = None

    def read(self) -> None:
        """Judge the last step, if the device has left that for later."""
        last, self._open = self._open, None
        if last is not None:
            self._skips(last, last.end.read())

    def take(self, engine: Discards, step: OpenStep) -> bool:
        """Take a step whose gradients are there, and tell whether the host leaves it out.

        Args:
            engine: whose optimizer has not been stepped yet.
            step: the step; the one before it has been read.
        """
        if step.is_masked:
            self._open = step
            engine.mask_step(step.end)
            return False
        numbers = step.end.read()
        skips = self._skips(step, numbers)
        if skips:
            engine.discard_step(numbers)
        return skips

    def forget(self) -> None:
        """Forget the last step: other weights are loaded, or another training begins."""
        self._open = None
