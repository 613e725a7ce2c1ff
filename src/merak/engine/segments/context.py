"""What the segments of a stage read besides values of other segments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from merak.engine.segments.activation_offload import Offload
from merak.engine.tensors_by_name import BeginSums, ParamLeaves, TensorDict, no_sums


class InShares(Protocol):
    """Parameters that are gathered for a segment alone; `sharded.Sharded` is such."""

    def begin(self, names: Sequence[str]) -> None:
        """The turn of a segment with these parameters begins."""

    def call(
        self,
        names: Sequence[str],
        weights: ParamLeaves,
        compute: Callable[[ParamLeaves], tuple[torch.Tensor, ...]],
    ) -> tuple[torch.Tensor, ...]:
        """Call the segment."""

    def end(self, names: Sequence[str]) -> None:
        """Its turn is over."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """For one microbatch on one stage.

    Args:
        weights: the parameters by name.
        buffers: the buffers and the trace's constants by name.
        columns: of the microbatch.
        batch_only: its batch-only values.
        random_key: names the microbatch, for its draws.
        device: where it computes.
        sharded: parameters that are gathered for a segment alone; None for none.
        offload: what moves activations to host memory; None for nothing.
        begin_sums: gives what enters the backward of a segment besides its outputs' gradients.
    """

    weights: ParamLeaves
    buffers: Mapping[str, torch.Tensor]
    columns: Mapping[str, torch.Tensor]
    batch_only: Mapping[str, torch.Tensor]
    random_key: tuple[int | str, ...]
    device: torch.device
    sharded: InShares | None = None
    offload: Offload | None = None
    begin_sums: BeginSums = no_sums


def add_to(gradients: TensorDict, name: str, gradient: torch.Tensor) -> None:
    """Sum the gradients of a value's readers.

    Later readers come first in the backward, as in autograd's own order of summing.
    """
    known = gradients.get(name)
    gradients[name] = gradient if known is None else known + gradient
