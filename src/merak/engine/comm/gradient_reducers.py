"""The reducers of a rank: of gradients that all replicas sum, and of its experts'."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from merak.engine.comm.compression.stages import GradientCompression
from merak.engine.comm.gradient_buckets import GradientReducer


class GradientReducers:
    """Reducers of different parameters, over groups of ranks of their own, as one.

    Args:
        reducers: each with a rank's stages; all ranks have them in the same order.
    """

    def __init__(self, reducers: Sequence[GradientReducer]) -> None:
        self._reducers = reducers

    @property
    def compression(self) -> GradientCompression | None:
        """The compression of the reductions over all replicas; None for none."""
        return self._reducers[0].compression

    @property
    def every_microbatch(self) -> bool:
        """Whether gradients are reduced after every microbatch, as of `GradientReducer`."""
        return self._reducers[0].every_microbatch

    @every_microbatch.setter
    def every_microbatch(self, value: bool) -> None:
        for reducer in self._reducers:
            reducer.every_microbatch = value

    def tell_arrivals(self, arrived: Callable[[Sequence[torch.nn.Parameter]], None] | None) -> None:
        """Have a function called with parameters whose reduced gradients have arrived early."""
        for reducer in self._reducers:
            reducer.arrived = None if reducer.every_microbatch else arrived

    def reduces(self, stage: int) -> bool:
        """Whether other ranks have gradients of a stage to sum with."""
        return any(reducer.reduces(stage) for reducer in self._reducers)

    def start_step(self, order: Iterable[int]) -> None:
        """Set the order of a step's reductions, as of `GradientReducer`."""
        stages = tuple(order)
        for reducer in self._reducers:
            reducer.start_step(stages)

    def ready(self, stage: int, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Reduce the buckets that are complete, as of `GradientReducer`."""
        final = tuple(parameters)
        for reducer in self._reducers:
            reducer.ready(stage, final)

    def complete(self, stage: int) -> None:
        """Reduce all of a stage's gradients, as of `GradientReducer`."""
        for reducer in self._reducers:
            reducer.complete(stage)

    def microbatch_done(self, stage: int) -> None:
        """Reduce the gradients of a microbatch that is not the last, as of `GradientReducer`."""
        for reducer in self._reducers:
            reducer.microbatch_done(stage)

    def wait(self) -> None:
        """Wait for the reductions, and replace the gradients by them."""
        for reducer in self._reducers:
            reducer.wait()

    def forget(self) -> None:
        """Free the reductions of a step that failed."""
        for reducer in self._reducers:
            reducer.forget()
