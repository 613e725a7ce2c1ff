"""Data types of the graph: placeholders' kinds, segments, and the model cut into segments.

Graphs are `torch.fx.Graph`s of ATen operators. Every node carries, in `node.meta`:

    "tensor"   TensorMeta, a tuple of them, or None: what the node yields
    "source"   "path/to/model.py:123", the user's line that made it ("" if unknown)
    "module"   the path of the module in the user's model that it ran in
    "origin"   in a segment rewritten for a rank, the name of the traced node it stands for

Placeholders also carry `"kind"` (a `Kind`) and `"name"`: a parameter's or buffer's name in the
user's model, the batch's column, or the name of a value from an earlier segment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import fx

from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.state_read import StateRead

LITERAL = "literal "
"""Beginning of names of constants that forward makes in each call; others the model holds."""


class Kind(Enum):
    """Kind of a placeholder."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    COLUMN = "column"
    VALUE = "value"
    BATCH_ONLY = "batch_only"


@dataclass(frozen=True, slots=True)
class Segment:
    """The smallest piece that sharding yields: one attention block, one feed-forward block, ….

    Its graph's placeholders are the parameters, buffers, columns, inputs and batch-only values
    below, in that order; it returns the tuple of its outputs.

    Args:
        index: position in the model's list of segments.
        name: the module path of the user's model it mostly comes from, for people to read.
        graph: ATen operators.
        parameters: names in the user's model of the parameters it reads.
        buffers: names of the buffers it reads (constants of the trace included).
        columns: columns of the batch it reads.
        inputs: values of earlier segments it reads.
        outputs: values it gives to later segments, or to the caller.
        batch_only: values it reads that depend on the batch alone (masks, position ids, rotary
            tables); each rank computes those it needs from the prologue, none is ever sent.
    """

    index: int
    name: str
    graph: fx.Graph
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    columns: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    batch_only: tuple[str, ...] = ()

    @classmethod
    def of(cls, index: int, name: str, graph: fx.Graph, outputs: Iterable[str]) -> Segment:
        """Segment of a graph whose placeholders carry their kind and name.

        Args:
            index: position in the model's list of segments.
            name: for people to read.
            graph: its placeholders carry "kind" and "name".
            outputs: names of what the graph returns.
        """
        read: dict[Kind, list[str]] = {kind: [] for kind in Kind}
        for node in graph.find_nodes(op="placeholder"):
            read[node.meta["kind"]].append(node.meta["name"])
        return cls(
            index=index,
            name=name,
            graph=graph,
            parameters=tuple(read[Kind.PARAMETER]),
            buffers=tuple(read[Kind.BUFFER]),
            columns=tuple(read[Kind.COLUMN]),
            inputs=tuple(read[Kind.VALUE]),
            outputs=tuple(outputs),
            batch_only=tuple(read[Kind.BATCH_ONLY]),
        )


@dataclass(frozen=True, slots=True)
class ParameterWrites:
    """Writes of a model into one of its parameters, made while it runs and before it reads it.

    Doing it again changes nothing more, so it is done before the segments run, and none of them
    does it.

    Args:
        parameter: its name.
        graph: the operators that write; its placeholders are the parameter, and the buffers and
            columns below; it returns nothing.
        buffers: names of the buffers that it reads.
        columns: names of the columns that it reads.
        elementwise: whether every element is written by itself, so that a shard of them is, too.
    """

    parameter: str
    graph: fx.Graph
    buffers: tuple[str, ...]
    columns: tuple[str, ...]
    elementwise: bool


@dataclass(frozen=True, slots=True)
class ModelGraph:
    """A traced model, cut into segments.

    Args:
        segments: in execution order.
        prologue: computes every batch-only value from the batch; see
            `graph.segment.cut.slice_outputs`.
        values: what every value that crosses a cut or leaves the model is, by name.
        parameters: what every parameter is, by its (first) name in the user's model.
        tied: other names of a tied parameter → its first name.
        constants: tensors that the trace found outside the model's buffers, by name: of those that
            the model holds, their place; what training writes into these goes on as buffers do.
        columns: the batch it was traced with, by column.
        outputs: the model's own output names (loss, logits, …) → value names.
        loss: the value name of the loss; None when the model was traced for prediction alone.
        parameter_writes: what is written into parameters before the segments run.
        reads: Python state that the trace took as constants.
        queried: columns whose values the model has asked for where ones would have decided, as of
            an attention mask: a batch of ones has a graph of its own.
        replay: runs a loss of the script's own once more, for what it does besides, with the values
            of those outputs that it reads on the host; None for nothing. See
            `merak.graph.trace.calls.replay.Replay`.
    """

    segments: tuple[Segment, ...]
    prologue: Segment
    values: dict[str, TensorMeta]
    parameters: dict[str, TensorMeta]
    tied: dict[str, str]
    constants: dict[str, torch.Tensor]
    columns: dict[str, TensorMeta]
    outputs: dict[str, str]
    loss: str | None
    parameter_writes: tuple[ParameterWrites, ...] = ()
    reads: tuple[StateRead, ...] = ()
    queried: frozenset[str] = frozenset()
    replay: Callable[..., None] | None = None

    def columns_read(self) -> frozenset[str]:
        """Columns of the batch that anything is computed of."""
        return frozenset(c for s in (self.prologue, *self.segments) for c in s.columns)

    def boundaries(self) -> tuple[tuple[str, ...], ...]:
        """Values that cross each cut between neighbouring segments, in linear time."""
        last = {name: s.index for s in self.segments for name in s.inputs}
        alive: list[str] = []
        crossing = []
        for segment in self.segments[:-1]:
            alive = [n for n in (*alive, *segment.outputs) if last.get(n, -1) > segment.index]
            crossing.append(tuple(alive))
        return tuple(crossing)


def returned_nodes(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """The nodes that a graph returns, in order."""
    returned: Any = graph.output_node().args[0]
    return tuple(returned)


def batch_size(graph: ModelGraph) -> int:
    """Batch size of a microbatch: the first size of most of its columns."""
    sizes = Counter(meta.shape[0] for meta in graph.columns.values() if meta.shape)
    return sizes.most_common(1)[0][0] if sizes else 1
