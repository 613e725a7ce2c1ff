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
        self._deferred: dict[int, list[WeightGradient]] = {}
        self._microbatch = 0

    def start(self, microbatch: int) -> None:
        """Begin the backward of a microbatch, to which deferred gradients then belong."""
        self._microbatch = microbatch

    def add(self, gradient: WeightGradient) -> None:
        """Defer some gradients; called in a backward."""
        self._deferred.setdefault(self._microbatch, []).append(gradient)

    def run(self, microbatch: int) -> None:
        """Compute all weight gradients that a microbatch has deferred so far."""
        for gradient in self._deferred.pop(microbatch, ()):
            gradient()

    def forget(self) -> None:
        """Drop the deferred gradients of a step that failed."""
        self._deferred.clear()
