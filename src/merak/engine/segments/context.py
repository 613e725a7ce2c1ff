"""What the segments of a stage read besides values of other segments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from merak.engine.segments.activation_offload import Offload
from merak.engine.weight_versions import Leaves
from merak.graph.program.program import SegmentProgram

Values = dict[str, torch.Tensor]

Sums = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Leaves, and the gradients that later readers have given to each."""

BeginSums = Callable[[SegmentProgram, Leaves], Sums]
"""Called before a segment's backward: gives the leaves of parameters that it reads several times
and later segments read as well, with what those have given; see `tied.TiedGradients.begin`."""


class InShares(Protocol):
    """Parameters that are gathered for a segment alone; `sharded.Sharded` is such."""

    def begin(self, names: Sequence[str]) -> None:
        """The turn of a segment with these parameters begins."""

    def call(
        self,
        names: Sequence[str],
        weights: Leaves,
        compute: Callable[[Leaves], tuple[torch.Tensor, ...]],
    ) -> tuple[torch.Tensor, ...]:
        """Call the segment."""

    def end(self, names: Sequence[str]) -> None:
        """Its turn is over."""


def no_sums(segment: SegmentProgram, leaves: Leaves) -> Sums:
    """Where no gradient is collected over several segments."""
    return ()


@dataclass(frozen=True, slots=True)
class Surroundings:
    """For one microbatch on one stage.

    Args:
        weights: the parameters by name.
        buffers: the buffers and the trace's constants by name.
        columns: of the microbatch.
        derived: its derived values.
        random_key: names the microbatch, for its draws.
        device: where it computes.
        sharded: parameters that are gathered for a segment alone; None for none.
        offload: what moves activations to host memory; None for nothing.
        begin_sums: gives what enters the backward of a segment besides its outputs' gradients.
    """

    weights: Leaves
    buffers: Mapping[str, torch.Tensor]
    columns: Mapping[str, torch.Tensor]
    derived: Mapping[str, torch.Tensor]
    random_key: tuple[int | str, ...]
    device: torch.device
    sharded: InShares | None = None
    offload: Offload | None = None
    begin_sums: BeginSums = no_sums


def add_to(gradients: Values, name: str, gradient: torch.Tensor) -> None:
    """Sum the gradients of a value's readers.

    Later readers come first in the backward, as in autograd's own order of summing.
    """
    known = gradients.get(name)
    gradients[name] = gradient if known is None else known + gradient
