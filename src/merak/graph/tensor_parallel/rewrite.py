"""Rewriting of a segment's graph for one rank: local sizes, and the collectives between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map_only

from merak.core.errors import ShardError
from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.custom_operators import Role, role_of
from merak.graph.ir.mutation import has_mutable_schema, mutated_arguments
from merak.graph.tensor_parallel.conversion import Step, Ways, entering, last_step
from merak.graph.tensor_parallel.placement import (
    AXIS,
    REPLICATE,
    REPLICATE_PARTIAL_GRAD,
    Decision,
    Degree,
    Placement,
    local_meta,
    need_of,
    where,
)
from merak.graph.tensor_parallel.propagate import Propagation
from merak.graph.trace.opaque.operator import cost_of, is_opaque
from merak.ops.collectives import reduce_from


def rewrite(graph: fx.Graph, propagation: Propagation, degree: int) -> fx.Graph:
    """Graph that every rank runs on its shards.

    Args:
        graph: the segment's graph; left as it is.
        propagation: what becomes of its operators.
        degree: the number of ranks.

    Returns:
        A new graph with the same placeholders and outputs; every output is replicated, unless the
        propagation says otherwise.

    Raises:
        ShardError: operators that do not fit their local operands.
    """
    rewriter = Rewriter(propagation, degree)
    new = rewriter.run(graph)
    check_shapes(rewriter.split)
    return new


class Rewriter:
    """Rewriter of a graph; every conversion of a value is inserted once.

    Args:
        propagation: what becomes of the operators.
        degree: the number of ranks; or of times that a part of unequal ones is in the whole.
        axis: the mesh axis that they lie along.
    """

    def __init__(self, propagation: Propagation, degree: Degree, axis: str = AXIS) -> None:
        self.propagation = propagation
        self.degree = degree
        self.axis = axis
        self.ways = Ways(axis, propagation.scatters, propagation.exchanges)
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.converted: dict[tuple[fx.Node, Placement], fx.Node] = {}
        self.split: list[fx.Node] = []

    def run(self, graph: fx.Graph) -> fx.Graph:
        """Rewrite a segment's graph into that of one rank."""
        for node in graph.nodes:
            if node.op == "output":
                self.leave(node)
            elif node.op == "call_function":
                self.env[node] = self.operator(node, self.propagation.decisions[node])
            else:
                self.env[node] = self.graph.node_copy(node, lambda n: self.env[n])
                self.env[node].meta = self.local(node)
                self.enter(node)
        return self.graph

    def leave(self, output: fx.Node) -> None:
        """Results, as they leave the segment."""
        leaving = self.propagation.leaving
        self.graph.output(fx.map_arg(output.args[0], lambda n: self.convert(n, leaving(n))))

    def enter(self, node: fx.Node) -> None:
        """Replicated weight whose gradient the ranks all-reduce."""
        meta = node.meta["tensor"]
        placed = self.propagation.placements[node]
        if not isinstance(meta, TensorMeta) or not meta.requires_grad:
            return
        step = entering(placed, self.degree, self.axis)
        if step is not None and not isinstance(placed, tuple):
            self.env[node] = self.insert(step, self.env[node], node, placed)

    def local(self, node: fx.Node) -> dict[str, Any]:
        """Metadata of a rank's share of a value."""
        placed = self.propagation.placements[node]
        local = local_meta(node.meta["tensor"], placed, self.degree)
        return {"origin": node.name, **node.meta, "tensor": local}

    def operator(self, node: fx.Node, decision: Decision) -> fx.Node:
        """Operator on this rank's shards, and the steps that complete its result."""

        def operand(n: fx.Node) -> fx.Node:
            return self.convert(n, need_of(n, decision, self.propagation.placements))

        args = node.args if decision.args is None else decision.args
        kwargs = node.kwargs if decision.kwargs is None else decision.kwargs
        target = decision.target or node.target
        assert callable(target)
        new = self.call(target, fx.map_arg(args, operand), fx.map_arg(kwargs, operand), node)
        new.meta = self.local(node)
        if is_opaque(new):
            new.meta["opaque"] = replace(new.meta["opaque"], cost=cost_of(new))
        if decision.output != REPLICATE:
            self.split.append(new)
        if has_mutable_schema(new):
            self.forget(node)
        if decision.becomes is not None:
            assert not isinstance(decision.output, tuple)
            return self.become(node, new, decision.output, decision.becomes)
        if not decision.then:
            return new
        new = self.call(reduce_from, (new, self.axis), {}, node)
        for step, further in decision.then:
            whole = fx.map_arg(further, lambda n: self.convert(n, REPLICATE))
            new = self.call(step, (new, *whole), {}, node)
        return new

    def forget(self, write: fx.Node) -> None:
        """Forget conversions made before a write, which hold the old numbers."""
        written = {n.meta.get("storage") for n in mutated_arguments(write)} | {None}
        kept = self.converted.items()
        self.converted = {
            (node, need): new
            for (node, need), new in kept
            if node.meta.get("storage") not in written
        }

    def become(self, node: fx.Node, new: fx.Node, placed: Placement, wanted: Placement) -> fx.Node:
        """Result of an operator, converted at once."""
        new.meta["tensor"] = local_meta(node.meta["tensor"], placed, self.degree)
        return self.insert(last_step(placed, wanted, self.ways), new, node, wanted)

    def call(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        origin: fx.Node,
    ) -> fx.Node:
        """New node for an old one."""
        new = self.graph.call_function(target, args, kwargs)
        new.meta = {"origin": origin.name, **origin.meta}
        return new

    def convert(self, node: fx.Node, need: Placement | None) -> fx.Node:
        """New value of an old node in the placement that is needed; None for the one it has."""
        placed = self.propagation.placements[node]
        if need is None or placed == need:
            return self.env[node]
        assert not isinstance(placed, tuple)
        if need == REPLICATE_PARTIAL_GRAD and not node.meta["tensor"].requires_grad:
            return self.convert(node, REPLICATE)
        if placed == REPLICATE_PARTIAL_GRAD and not node.meta["tensor"].requires_grad:
            placed = REPLICATE
            if need == REPLICATE:
                return self.env[node]
        if (node, need) not in self.converted:
            self.converted[node, need] = self.conversion(node, placed, need)
        return self.converted[node, need]

    def conversion(self, node: fx.Node, placed: Placement, need: Placement) -> fx.Node:
        """Value converted from one placement to another."""
        try:
            step = last_step(placed, need, self.ways)
        except ShardError as error:
            raise ShardError(f"{node} ({where(node)}) cannot be converted: {error}") from None
        before = self.env[node] if step.source == placed else self.convert(node, step.source)
        return self.insert(step, before, node, need)

    def insert(self, step: Step, value: fx.Node, node: fx.Node, placed: Placement) -> fx.Node:
        """Step of a conversion of an old value, by a new operator."""
        args = fx.map_arg(step.args, lambda n: self.env[n])
        new = self.call(step.target, (value, *args), {}, node)
        kept = {k: v for k, v in new.meta.items() if k in ("source", "module", "origin")}
        new.meta = {**kept, "tensor": local_meta(node.meta["tensor"], placed, self.degree)}
        return new


def check_shapes(nodes: Sequence[fx.Node]) -> None:
    """Check of the rewritten operators' shapes, on fake tensors.

    Raises:
        ShardError: an operator that does not take its local operands, or yields another shape than
            the rules say.
    """
    for node in nodes:
        is_alone = role_of(node) is not Role.COLLECTIVE
        if isinstance(node.target, torch._ops.OpOverload) and is_alone:
            _check_operator(node)


def _check_operator(node: fx.Node) -> None:
    found_args: Any = fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["tensor"])
    found = _run_on_meta(node.target, *found_args)
    if found != (expected := _shapes(node.meta["tensor"])):
        raise ShardError(
            f"the shard of {node.name} ({where(node)}) should be {expected} on every rank "
            f"but gives {found}; give the layers before it Replicate() in the feature dict."
        )


@lru_cache(maxsize=4096)  # shapes of one block are those of all
def _run_on_meta(target: Any, args: Any, kwargs: Any) -> Any:
    """Shapes of what an operator yields, or a clause about its error."""
    empty = tree_map_only(TensorMeta, _empty, (args, kwargs))
    args, kwargs = tree_map_only(torch.device, lambda _: torch.device("meta"), empty)
    try:
        with torch.no_grad():
            return _shapes(target(*args, **kwargs))
    except Exception as error:
        reason = str(error).strip().splitlines()
        return f"an error ({reason[0] if reason else type(error).__name__})"


def _empty(meta: TensorMeta) -> torch.Tensor:
    return torch.empty(meta.shape, dtype=meta.dtype, device="meta")


def _shapes(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(_shapes(v) for v in value)
    return tuple(value.shape) if isinstance(value, (torch.Tensor, TensorMeta)) else None
