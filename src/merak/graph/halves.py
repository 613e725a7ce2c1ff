"""Segments for half a microbatch: what sub-pipelining runs twice, one half beside the other.

A segment may run in halves if every operator in it treats the samples of a microbatch one by one.
The rules of tensor parallelism tell: with the batch split as if over two ranks, no operator may ask
for a collective. A half's dropout takes its rows of the pattern that the whole would draw, so that
two halves give what the whole gives.

Source: Merak (IEEE TPDS), section 5.3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from merak.core.errors import ShardError
from merak.graph.ir import Kind, Segment, TensorMeta
from merak.graph.sharding_placement import (
    COPIED,
    REPLICATED,
    Copied,
    Decision,
    Operator,
    Partial,
    Placed,
    Placement,
    Sharded,
    local_meta,
)
from merak.graph.sharding_random import attend_sharded, dropout_sharded
from merak.graph.sharding_rules import decide

aten = torch.ops.aten
_DROPPING: Mapping[Any, str] = {dropout_sharded: "layout", attend_sharded: "layout"}


@dataclass(frozen=True, slots=True)
class Halves:
    """A segment in two halves.

    Args:
        segments: what each half runs, with the names of the whole's inputs and outputs.
        dims: the dim along which a half has its part, by the name of an input, column, derived
            value or output; both halves read whole what is not named.
    """

    segments: tuple[Segment, Segment]
    dims: Mapping[str, int]


def halve(segment: Segment, batch_size: int) -> Halves:
    """Split a segment over the samples of a microbatch.

    Args:
        segment: the segment as traced; left as it is.
        batch_size: samples of the microbatch it was traced for: the first size of its columns, and
            of the values between segments.

    Raises:
        ShardError: an odd number of samples, or an operator that does not treat them one by one.
    """
    if batch_size % 2:
        raise ShardError(f"a microbatch of {batch_size} samples has no equal halves.")
    placements: dict[fx.Node, Placed] = {}
    decisions: dict[fx.Node, Decision] = {}
    for node in segment.graph.nodes:
        if node.op == "call_function":
            decisions[node] = _decide(Operator(node, placements, 2))
            placements[node] = decisions[node].output
        elif node.op == "placeholder":
            placements[node] = _entering(node, batch_size)
    outputs = _output_nodes(segment)
    dims = {
        node.meta["name"]: placed.dim
        for node, placed in placements.items()
        if node.op == "placeholder" and isinstance(placed, Sharded)
    }
    for name, node in zip(segment.outputs, outputs, strict=True):
        placed = placements[node]
        if not isinstance(placed, Sharded):
            raise ShardError(f"its result {name} does not belong to single samples.")
        dims[name] = placed.dim
    first, second = (
        replace(segment, graph=_Writer(placements, decisions, half).run(segment.graph))
        for half in range(2)
    )
    return Halves((first, second), dims)


def _output_nodes(segment: Segment) -> tuple[fx.Node, ...]:
    (output,) = segment.graph.find_nodes(op="output")
    nodes = output.args[0]
    assert isinstance(nodes, tuple)
    return nodes


def _entering(node: fx.Node, batch_size: int) -> Placement:
    """What enters a half: its samples, of what has as many as the microbatch; else all of it."""
    meta = node.meta["tensor"]
    if node.meta["kind"] in (Kind.PARAMETER, Kind.BUFFER) or not isinstance(meta, TensorMeta):
        return REPLICATED
    if meta.shape[:1] == (batch_size,):
        return Sharded(0, (batch_size,))
    return REPLICATED


def _decide(op: Operator) -> Decision:
    """The rule of tensor parallelism, where it needs nothing of the other half."""
    if getattr(getattr(op.node.target, "_schema", None), "is_mutable", False):
        _refuse_writes(op)
    rule = _MORE_RULES.get(str(op.node.target))
    decision = rule(op) if rule is not None else decide(op)
    placed = decision.output if isinstance(decision.output, tuple) else (decision.output,)
    if decision.then or any(isinstance(p, Partial) for p in placed):
        raise op.error("sums over the samples of a microbatch")
    for node, need in decision.needs.items():
        if not isinstance(need, (Sharded, Copied)) and isinstance(op.placement(node), Sharded):
            raise op.error("must see all samples of a microbatch")
    return decision


def _refuse_writes(op: Operator) -> None:
    """A write into a buffer would happen twice."""
    written = op.node.args[0]
    while isinstance(written, fx.Node) and written.op == "call_function":
        written = written.all_input_nodes[0] if written.all_input_nodes else None
    if isinstance(written, fx.Node) and written.meta["kind"] is Kind.BUFFER:
        raise op.error("writes a buffer of the model")


def _embedding(op: Operator) -> Decision:
    """embedding: one row of the weight per index."""
    weight, indices = op.arg("weight"), op.arg("indices")
    placed = op.placement(indices)
    if op.placement(weight) != REPLICATED or not isinstance(placed, Sharded):
        return decide(op)
    return Decision(placed, {weight: COPIED})


_MORE_RULES: dict[str, Callable[[Operator], Decision]] = {
    "aten.embedding.default": _embedding,
}


class _Writer:
    """Writes the graph of one half."""

    def __init__(
        self,
        placements: Mapping[fx.Node, Placed],
        decisions: Mapping[fx.Node, Decision],
        half: int,
    ) -> None:
        self.placements = placements
        self.decisions = decisions
        self.half = half
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.narrowed: dict[tuple[fx.Node, int], fx.Node] = {}

    def run(self, graph: fx.Graph) -> fx.Graph:
        for node in graph.nodes:
            if node.op == "output":
                self.graph.output(fx.map_arg(node.args[0], lambda n: self.env[n]))
                continue
            if node.op == "call_function":
                self.env[node] = self.operator(node, self.decisions[node])
            else:
                self.env[node] = self.graph.node_copy(node, lambda n: self.env[n])
            local = local_meta(node.meta["tensor"], self.placements[node], 2)
            self.env[node].meta = {**node.meta, "tensor": local}
        return self.graph

    def operator(self, node: fx.Node, decision: Decision) -> fx.Node:
        def operand(n: fx.Node) -> fx.Node:
            need = decision.needs.get(n)
            if isinstance(need, Sharded) and not isinstance(self.placements[n], Sharded):
                return self.rows_of(n, need.dim)
            return self.env[n]

        target = decision.target or node.target
        args = node.args if decision.args is None else decision.args
        kwargs = dict(node.kwargs if decision.kwargs is None else decision.kwargs)
        if target in _DROPPING:
            args, kwargs = self.own_rows(target, args, kwargs, node)
        assert callable(target)
        return self.graph.call_function(
            target, fx.map_arg(args, operand), fx.map_arg(kwargs, operand)
        )

    def rows_of(self, node: fx.Node, dim: int) -> fx.Node:
        """The half's part of what it reads whole otherwise."""
        if (node, dim) not in self.narrowed:
            meta = node.meta["tensor"]
            size = meta.shape[dim] // 2
            new = self.graph.call_function(
                aten.narrow.default, (self.env[node], dim, self.half * size, size)
            )
            new.meta = {**node.meta, "tensor": local_meta(meta, Sharded(dim, ()), 2)}
            self.narrowed[node, dim] = new
        return self.narrowed[node, dim]

    def own_rows(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], node: fx.Node
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Dropout over a split batch: not by rank, but by the half's rows of the pattern."""
        placed = self.placements[node]
        assert isinstance(placed, Sharded)
        whole = node.meta["tensor"].shape[placed.dim]
        rows = (placed.dim, self.half * whole // 2, whole)
        if target is dropout_sharded:
            operand, p, train, _ = args
            return (operand, p, train, None), {"rows": rows}
        return args, {**kwargs, "layout": None, "rows": rows}
