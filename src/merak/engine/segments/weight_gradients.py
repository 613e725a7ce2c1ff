"""Gradients of weights that a split backward has left for later.

Source: arXiv:2401.10241, section 2.
"""

from __future__ import annotations

from collections.abc import Callable

WeightGradient = Callable[[], object]
"""Adds one microbatch's gradients of weights to theirs, beneath autograd."""


class WeightGradients:
    """Deferred weight gradients of one stage."""

    def __init__(self) -> None:
        self._deferred: dict[tuple[int, int], list[WeightGradient]] = {}
        self._due: list[WeightGradient] = []
        self._microbatch, self._defers = 0, True

    def start(self, microbatch: int, defers: bool) -> None:
        """Begin the backward of a microbatch, to which what it leaves then belongs.

        Args:
            microbatch: its number.
            defers: whether gradients are left for an action of their own; else for the end of the
                backward of their segment.
        """
        self._microbatch, self._defers = microbatch, defers

    def add(self, segment: int, gradient: WeightGradient, at_once: bool = False) -> None:
        """Leave some gradients for later; called in a backward.

        Args:
            segment: number of the segment that they are of.
            gradient: computes them.
            at_once: whether the end of the segment's backward is the latest.
        """
        if at_once or not self._defers:
            self._due.append(gradient)
        else:
            self._deferred.setdefault((self._microbatch, segment), []).append(gradient)

    def segment_ended(self) -> None:
        """Compute what the backward of a segment has left for its end."""
        _run_all(self._due)

    def run(self, microbatch: int, segment: int) -> None:
        """Compute what the backward of a segment has left for an action of its own."""
        _run_all(self._deferred.pop((microbatch, segment), []))

    def forget(self) -> None:
        """Drop what a step that failed has left."""
        self._deferred.clear()
        self._due.clear()


def _run_all(gradients: list[WeightGradient]) -> None:
    while gradients:
        gradients.pop(0)()
