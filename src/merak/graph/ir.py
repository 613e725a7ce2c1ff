"""The words of the graph: what a value is, what a segment is, what a traced model is.

Graphs are `torch.fx.Graph`s of ATen operators. Every node carries, in `node.meta`:

    "tensor"   TensorMeta, a tuple of them, or None: what the node yields
    "source"   "path/to/model.py:123 in module.path", the user's line that made it ("" if unknown)

Placeholders also carry `"kind"` (a `Kind`) and `"name"`: a parameter's or buffer's name in the
user's model, the batch's column, or the name of a value from an earlier segment.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch
from torch import fx


class Kind(Enum):
    """What a placeholder stands for."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    COLUMN = "column"
    VALUE = "value"


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """A tensor without its numbers.

    Args:
        shape: sizes of its dims.
        dtype: its element type.
        requires_grad: whether a gradient flows through it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor, laid out densely."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Segment:
    """The smallest piece that sharding yields: one attention block, one feed-forward block, ….

    Its graph's placeholders are the parameters, buffers, columns and inputs below, in that order;
    it returns the tuple of its outputs.

    Args:
        index: position in the model's list of segments.
        name: the module path of the user's model it mostly comes from, for people to read.
        graph: ATen operators.
        parameters: names in the user's model of the parameters it reads.
        buffers: names of the buffers it reads (constants of the trace included).
        columns: columns of the batch it reads.
        inputs: values of earlier segments it reads.
        outputs: values it gives to later segments, or to the caller.
    """

    index: int
    name: str
    graph: fx.Graph
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    columns: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelGraph:
    """A traced model, cut into segments.

    Args:
        segments: in execution order.
        values: what every value that crosses a cut or leaves the model is, by name.
        parameters: what every parameter is, by its (first) name in the user's model.
        tied: other names of a tied parameter → its first name.
        constants: tensors that the trace found outside the model's buffers, by name.
        columns: the batch it was traced with, by column.
        outputs: the model's own output names (loss, logits, …) → value names.
        loss: the value name of the loss; None when the model was traced for prediction alone.
    """

    segments: tuple[Segment, ...]
    values: dict[str, TensorMeta]
    parameters: dict[str, TensorMeta]
    tied: dict[str, str]
    constants: dict[str, torch.Tensor]
    columns: dict[str, TensorMeta]
    outputs: dict[str, str]
    loss: str | None

    def boundary(self, cut: int) -> tuple[str, ...]:
        """The values that cross the cut before segment `cut`: made before it, read at or after."""
        made = {name for segment in self.segments[:cut] for name in segment.outputs}
        read = {name for segment in self.segments[cut:] for name in segment.inputs}
        return tuple(sorted(made & read))
