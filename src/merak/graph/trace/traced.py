"""The result of a trace."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import ParameterWrites
from merak.graph.ir.state_read import StateRead
from merak.graph.trace.state.left import LeftState


@dataclass(frozen=True, slots=True)
class Trace:
    """A traced model as one graph, before it is cut into segments.

    Args:
        graph: ATen operators; placeholders carry `meta["kind"]` and `meta["name"]`; it returns the
            tuple of the model's tensor outputs.
        outputs: names of these outputs, in order ("loss" first where there is one).
        parameters: every parameter of the model, by its first name.
        tied: other names of a parameter → its first name.
        constants: tensors the model's code made outside its buffers, by name.
        columns: the batch it was traced with.
        sources: files whose code the trace ran through.
        num_conditions: how many random conditions were answered for it; the graph returns their
            booleans after the outputs, until `branches` has merged both branches of each.
        parameter_writes: writes into parameters, done before the graph runs.
        reads: Python state that is constant in the graph.
        left: places of Python state that forward has left other values in.
        remade: buffers that forward has replaced by tensors of another shape.
        is_warned_of: whether people have been warned of these.
        is_of_replica: whether it may be another one for another replica, or number of them.
        queried: as of `ModelGraph`.
        replay: as of `ModelGraph`.
    """

    graph: fx.Graph
    outputs: tuple[str, ...]
    parameters: dict[str, TensorMeta]
    tied: dict[str, str]
    constants: dict[str, torch.Tensor]
    columns: dict[str, TensorMeta]
    sources: frozenset[str] = field(default_factory=frozenset)
    num_conditions: int = 0
    parameter_writes: tuple[ParameterWrites, ...] = ()
    reads: tuple[StateRead, ...] = ()
    left: tuple[LeftState, ...] = ()
    remade: tuple[str, ...] = ()
    is_warned_of: bool = False
    is_of_replica: bool = False
    queried: frozenset[str] = frozenset()
    replay: Any = None  # a `Replay`

    @property
    def leaves(self) -> bool:
        """Whether forward leaves values that the next one may read."""
        return bool(self.remade) or any(one.may_be_read for one in self.left)
