"""The context of a segment: parameters, buffers, columns and batch-only values that it reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from merak.engine.segments.activation_offload import ActivationOffload
from merak.engine.segments.weight_gradients import WeightGradients
from merak.engine.tensors_by_name import (
    GiveLeafGradients,
    ParamLeaves,
    TensorDict,
    no_leaf_gradients,
)
from merak.graph.ir.ir import Segment
from merak.graph.program.codegen import Function
from merak.graph.program.program import SegmentProgram


class ShardedParameters(Protocol):
    """Parameters that are gathered for a segment, as `FsdpParameters` are."""

    def begin(self, names: Sequence[str]) -> None:
        """Gather the parameters of a segment that begins."""

    def weights(self, names: Sequence[str], others: ParamLeaves) -> ParamLeaves:
        """The parameters of a segment, while the sharded ones are gathered."""

    def end(self, names: Sequence[str]) -> None:
        """Free the parameters of a segment that has ended."""

    def reduce(self, names: Sequence[str]) -> None:
        """Reduce the gradients that its backward has left for later."""


class OperatorObserver(Protocol):
    """Observer of every operator of a step, such as `NonFiniteFinder`."""

    def function(self, segment: Segment, random_key: Sequence[int | str]) -> Function:
        """Function of a segment that looks at its operators."""


@dataclass(frozen=True, slots=True)
class SegmentContext:
    """The context of one microbatch on one stage.

    Args:
        weights: the parameters by name.
        buffers: the buffers and the trace's constants by name.
        columns: of the microbatch.
        batch_only: its batch-only values.
        random_key: names the microbatch, for its random state.
        device: where it computes.
        fsdp: parameters that are gathered segment by segment; None for none.
        offload: offloads activations to host memory; None for none.
        leaf_gradients: gives what enters the backward of a segment besides its outputs' gradients.
        observer: looks at every operator; None for nobody.
        weight_gradients: takes what a backward leaves for later; None where it leaves nothing.
    """

    weights: ParamLeaves
    buffers: Mapping[str, torch.Tensor]
    columns: Mapping[str, torch.Tensor]
    batch_only: Mapping[str, torch.Tensor]
    random_key: tuple[int | str, ...]
    device: torch.device
    fsdp: ShardedParameters | None = None
    offload: ActivationOffload | None = None
    leaf_gradients: GiveLeafGradients = no_leaf_gradients
    observer: OperatorObserver | None = None
    weight_gradients: WeightGradients | None = None

    def function(self, program: SegmentProgram) -> Function:
        """The function of a segment, which may be looked at."""
        if self.observer is None:
            return program.function
        return self.observer.function(program.segment, self.random_key)


def add_to(gradients: TensorDict, name: str, gradient: torch.Tensor) -> None:
    """Add a reader's gradient of a value to those of its other readers.

    Later readers come first in the backward, as in autograd's own order of summing.
    """
    known = gradients.get(name)
    gradients[name] = gradient if known is None else known + gradient
