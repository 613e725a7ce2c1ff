"""Observation of a segment while it runs: every operator's value and gradient."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import fx

from merak.core.shards import ParameterShard
from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import Segment
from merak.graph.segment.cut import copy_graph

Tensors = dict[str, torch.Tensor]


@dataclass(slots=True)
class Observed:
    """Values and gradients of operators, by name of the traced and of the executed operator.

    Where a traced operator is run as several (a shard of it, and the sum over ranks), each counts.

    Args:
        values: what they yielded when first run.
        gradients: what their first backward gave for it.
    """

    values: dict[str, Tensors] = field(default_factory=dict)
    gradients: dict[str, Tensors] = field(default_factory=dict)


class Observer:
    """Rewrite of segments that records their operators' results."""

    def __init__(self) -> None:
        self.observed = Observed()

    def __call__(self, segment: Segment) -> tuple[Segment, dict[str, ParameterShard]]:
        """Segment with a recording behind every operator that yields floating-point numbers."""
        graph, _ = copy_graph(segment.graph)
        elsewhere = {node.name for node in graph.find_nodes(op="placeholder")}
        for node in list(graph.nodes):
            origin = node.meta.get("origin", node.name)
            # What is made of an input here, such as a rank's shard, others make of it as well.
            if _yields_numbers(node) and origin not in elsewhere:
                with graph.inserting_after(node):
                    note = graph.call_function(self.note, (node, origin, node.name))
                note.meta = {"tensor": None, "source": "", "module": ""}
        return replace(segment, graph=graph), {}

    def note(self, value: torch.Tensor, origin: str, name: str) -> None:
        """Record a copy of a result, and of its gradient once there is one."""
        _keep(self.observed.values, origin, name, value)
        if value.requires_grad:
            gradients = self.observed.gradients
            value.register_hook(lambda gradient: _keep(gradients, origin, name, gradient))


def _keep(kept: dict[str, Tensors], origin: str, name: str, tensor: torch.Tensor) -> None:
    own = kept.setdefault(origin, {})
    if name not in own:
        own[name] = tensor.detach().to("cpu", copy=True)


def _yields_numbers(node: fx.Node) -> bool:
    meta = node.meta.get("tensor")
    if node.op != "call_function" or not isinstance(meta, TensorMeta):
        return False
    return meta.dtype.is_floating_point or meta.dtype.is_complex
