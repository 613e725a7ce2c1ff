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
from merak.graph.tensor_parallel.placement import (
    AXIS,
    PARTIAL,
    REPLICATE,
    REPLICATE_PARTIAL_GRAD,
    Decision,
    ExpertRows,
    Partial,
    PartlySharded,
    Placement,
    Shard,
    local_meta,
    need_of,
    where,
)
from merak.graph.tensor_parallel.propagate import Propagation
from merak.graph.trace.opaque.operator import at_cost, cost_of, is_opaque
from merak.ops.collectives import (
    copy_parts_to,
    copy_shared_to,
    copy_to,
    gather_from,
    gather_parts,
    gather_shared,
    gather_with_partial_grad,
    leave_partial_grad,
    local_slice,
    own_share,
    reduce_from,
    reduce_scatter_to,
    replicate_to_partial,
    slice_to,
)
from merak.ops.context_parallel import exchange_shards
from merak.ops.expert_rows import enter_experts, leave_experts


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
        degree: the number of ranks.
        axis: the mesh axis that they lie along.
    """

    def __init__(self, propagation: Propagation, degree: int, axis: str = AXIS) -> None:
        self.propagation = propagation
        self.degree = degree
        self.axis = axis
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
        if placed == REPLICATE_PARTIAL_GRAD:
            self.env[node] = self.insert(
                copy_to, (self.env[node], self.axis), node, REPLICATE_PARTIAL_GRAD
            )
        elif isinstance(placed, PartlySharded):
            local = tuple(
                size if i in placed.whole else size // self.degree
                for i, size in enumerate(placed.parts)
            )
            args = (self.env[node], placed.dim, local, tuple(sorted(placed.whole)), self.axis)
            self.env[node] = self.insert(copy_parts_to, args, node, placed)
        elif isinstance(placed, Shard) and placed.copies > 1:
            own = (self.env[node], placed.copies, self.axis)
            self.env[node] = self.insert(copy_shared_to, own, node, placed)

    def local(self, node: fx.Node) -> dict[str, Any]:
        """Metadata of a rank's share of a value."""
        placed = self.propagation.placements[node]
        local = local_meta(node.meta["tensor"], placed, self.degree)
        return {**node.meta, "tensor": local, "origin": node.name}

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
            new.meta["opaque"] = at_cost(new.meta["opaque"], cost_of(new))
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
        return self.exchanged(node, new, placed, wanted)

    def exchanged(
        self, node: fx.Node, new: fx.Node, placed: Placement, wanted: Placement
    ) -> fx.Node:
        """Shards along one dim, converted to shards along another."""
        assert isinstance(placed, Shard) and isinstance(wanted, Shard)
        args = (new, (placed.dim, placed.parts), (wanted.dim, wanted.parts), self.axis)
        return self.insert(exchange_shards, args, node, wanted)

    def call(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        origin: fx.Node,
    ) -> fx.Node:
        """New node for an old one."""
        new = self.graph.call_function(target, args, kwargs)
        new.meta = {**origin.meta, "origin": origin.name}
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
        if isinstance(need, ExpertRows):
            rows = (self.convert(node, REPLICATE_PARTIAL_GRAD), self.env[need.offsets], self.axis)
            return self.insert(enter_experts, rows, node, need)
        if isinstance(placed, ExpertRows) and isinstance(need, Partial):
            rows = (self.env[node], self.env[placed.offsets], self.axis)
            return self.insert(leave_experts, rows, node, need)
        if isinstance(placed, ExpertRows) and need == REPLICATE:
            return self.insert(reduce_from, (self.convert(node, PARTIAL), self.axis), node, need)
        is_shared = isinstance(placed, Shard) and placed.copies > 1
        if is_shared and (isinstance(need, Shard) or need == REPLICATE):
            return self.unshared(node, placed, need)
        if isinstance(need, Shard) and need.copies > 1:
            whole = self.convert(node, REPLICATE_PARTIAL_GRAD)
            own = (whole, need.dim, need.parts, self.axis, need.copies)
            return self.insert(local_slice, own, node, need)
        if self.propagation.exchanges and isinstance(placed, Shard) and isinstance(need, Shard):
            return self.exchanged(node, self.env[node], placed, need)
        if self.propagation.scatters and isinstance(placed, (Partial, Shard)) and not is_shared:
            scattered = self.scattered(node, placed, need)
            if scattered is not None:
                return scattered
        if isinstance(need, Partial):
            return self.insert(
                replicate_to_partial, (self.convert(node, REPLICATE), self.axis), node, need
            )
        if placed == REPLICATE_PARTIAL_GRAD and isinstance(need, Shard):
            args = (self.env[node], need.dim, need.parts, self.axis)
            return self.insert(local_slice, args, node, need)
        if placed == REPLICATE_PARTIAL_GRAD:
            return self.insert(leave_partial_grad, (self.env[node], self.axis), node, need)
        if need == REPLICATE_PARTIAL_GRAD:
            return self.insert(copy_to, (self.convert(node, REPLICATE), self.axis), node, need)
        if isinstance(need, Shard):
            assert not isinstance(placed, Shard), f"{node} is split along two dims"
            whole = self.convert(node, REPLICATE)
            return self.insert(slice_to, (whole, need.dim, need.parts, self.axis), node, need)
        if isinstance(placed, Partial):
            return self.insert(reduce_from, (self.env[node], self.axis), node, need)
        assert isinstance(placed, (Shard, PartlySharded)) and need == REPLICATE
        if isinstance(placed, PartlySharded):
            whole_parts = tuple(sorted(placed.whole))
            parts = (self.env[node], placed.dim, placed.parts, whole_parts, self.axis)
            return self.insert(gather_parts, parts, node, need)
        args = (self.env[node], placed.dim, placed.parts, self.axis)
        return self.insert(gather_from, args, node, need)

    def unshared(self, node: fx.Node, placed: Placement, need: Placement) -> fx.Node:
        """Shards that are each on several ranks, converted to fewer of them, or to the whole."""
        assert isinstance(placed, Shard)
        shards = (self.env[node], placed.dim, placed.parts, placed.copies)
        if isinstance(need, Shard):
            assert need == replace(placed, copies=need.copies), f"{node} is split in two ways"
            return self.insert(own_share, (*shards, need.copies, self.axis), node, need)
        return self.insert(gather_shared, (*shards, self.axis), node, need)

    def scattered(self, node: fx.Node, placed: Partial | Shard, need: Placement) -> fx.Node | None:
        """Conversion from or to shards without an all-reduce; None where there is none."""
        if isinstance(placed, Partial):
            if not isinstance(need, Shard):
                return None
            args = (self.env[node], need.dim, need.parts, self.axis)
            return self.insert(reduce_scatter_to, args, node, need)
        if need == REPLICATE_PARTIAL_GRAD:
            args = (self.env[node], placed.dim, placed.parts, self.axis)
            return self.insert(gather_with_partial_grad, args, node, need)
        if isinstance(need, Shard):
            args = (self.convert(node, REPLICATE_PARTIAL_GRAD), need.dim, need.parts, self.axis)
            return self.insert(local_slice, args, node, need)
        return None

    def insert(
        self, target: Callable[..., Any], args: tuple[Any, ...], node: fx.Node, placed: Placement
    ) -> fx.Node:
        """New operator that converts an old value."""
        new = self.call(target, args, {}, node)
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
