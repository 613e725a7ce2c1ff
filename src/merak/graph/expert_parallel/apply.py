"""Expert parallelism over replicas as a last rewriting of each segment.

The ranks of the axis read other samples, or other tokens, and hold the same parameters but for
their experts. Each sends the rows of other ranks' experts to them, and computes its own experts'
rows of all ranks; what a rank gives as the gradient of its experts is of all these.

Source: GShard (arXiv 2006.16668, section 3.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from merak.core.shards import ParameterShard
from merak.core.tensor_meta import TensorMeta
from merak.graph.context_parallel.apply import ContextParallel
from merak.graph.expert_parallel.rows import ExpertRegion, expert_regions, rows_of
from merak.graph.ir.ir import ModelGraph, Segment
from merak.graph.ir.operators import (
    RESHAPES,
    SAME_VALUES,
    SEPARATE_EXPERTS,
    SEPARATE_GEMMS,
    TRANSPOSES,
    family,
)
from merak.graph.ir.structure import structure_of_graph
from merak.graph.segment.cut import copy_graph
from merak.graph.tensor_parallel.apply import TensorParallel
from merak.graph.tensor_parallel.placement import Shard, local_meta, shape_of
from merak.graph.tensor_parallel.propagate import permuted_dims
from merak.graph.tensor_parallel.search.cost import parameter_nodes
from merak.graph.tensor_parallel.search.experts import (
    check_experts,
    experts_of,
    refuse_other_readers,
)
from merak.graph.tensor_parallel.search.no_experts import no_experts
from merak.ops.expert_dispatch import (
    batch_counts,
    batches_from_experts,
    batches_to_experts,
    expert_counts,
    from_experts,
    own_experts,
    own_offsets,
    to_experts,
    value_of_each_row,
)
from merak.ops.expert_rows import own_grouped_linear, own_grouped_values

EXPERT_AXIS = "ep"
"""The mesh axis of the ranks that have the experts of a layer between them."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertParallel:
    """Rewriting of a model's segments into those of a replica that has some of the experts.

    Args:
        degree: the number of replicas that have the experts of a layer between them.
        context: what context parallelism does to segments before; None for nothing.
    """

    degree: int
    context: ContextParallel | None = None

    def fit(self, model: ModelGraph) -> tuple[ModelGraph, ExpertParallel]:
        """Plan of the rewriting for a graph of the model, which is traced anew for every shape.

        Args:
            model: traced at any shapes; its segments are those that are rewritten afterwards.

        Returns:
            The graph, whose `values` are what a rank holds of them, and what rewrites its segments.
        """
        if self.context is None:
            return model, self
        graph, context = self.context.fit(model)
        return graph, replace(self, context=context)

    def __call__(self, segment: Segment) -> tuple[Segment, dict[str, ParameterShard]]:
        """Rewrite one segment of the graph that `fit` has seen.

        Args:
            segment: of the model; left as it is.

        Returns:
            The segment that every rank runs, and the layout of its experts.
        """
        own = segment if self.context is None else self.context(segment)[0]
        placed = {n: w.placed(n, self.degree) for n, w in experts_of(own).items()}
        if not placed:
            return own, {}
        graph = _spread(own.graph, placed, self.degree)
        shards = {
            n: ParameterShard(p.dim, p.parts, self.degree, owner=p.owner) for n, p in placed.items()
        }
        return replace(own, graph=graph), shards

    def like(self, segment: Segment) -> Hashable:
        """Key of a segment's rewriting: segments with equal keys differ in names alone.

        With context parallelism it is the segment itself: what tokens mix depends on its place.

        Args:
            segment: of the graph that `fit` has seen.
        """
        return segment if self.context is not None else structure_of_graph(segment.graph)


LocalRewrite = TensorParallel | ContextParallel | ExpertParallel
"""What makes a model's segments those of one rank."""


def expert_parallel(
    model: ModelGraph, context: ContextParallel | None, degree: int
) -> ExpertParallel:
    """Expert parallelism of a model over its replicas.

    Args:
        model: the traced model.
        context: its context parallelism.
        degree: the number of replicas that have the experts of a layer between them.

    Raises:
        ShardError: there are no experts, the degree does not divide their number, or something else
            reads their weights.
    """
    found = {n: w for segment in model.segments for n, w in experts_of(segment).items()}
    for name, weight in found.items():
        check_experts(name, weight.num_experts, degree)
    if not found:
        raise no_experts(model, degree)
    refuse_other_readers(model, degree)
    return ExpertParallel(degree, context)


def spread_weights(model: ModelGraph) -> frozenset[str]:
    """Names of the parameters that expert parallelism shares out over replicas."""
    return frozenset(name for segment in model.segments for name in experts_of(segment))


def _spread(graph: fx.Graph, experts: Mapping[str, Shard], degree: int) -> fx.Graph:
    """Graph of a rank with some of the experts."""
    new, _ = copy_graph(graph)
    weights = parameter_nodes(new)
    for name, placed in experts.items():
        _shrink(weights[name], placed, degree)
    for region in expert_regions(new, {weights[name] for name in experts}):
        _Exchange(region, degree).rewrite()
    new.lint()
    return new


def _shrink(node: fx.Node, placed: Shard, degree: int) -> None:
    """Give weights of experts, and what shows them in another way, the sizes of a rank's part."""
    node.meta = {**node.meta, "tensor": local_meta(node.meta["tensor"], placed, degree)}
    for user in node.users:
        name, dims = family(user.target), tuple(range(len(shape_of(node))))
        if name in TRANSPOSES:
            dims = permuted_dims(user, dims)
        if name in SAME_VALUES | TRANSPOSES:
            _shrink(user, replace(placed, dim=dims.index(placed.dim)), degree)


class _Exchange:
    """Rewriting of one region: its rows come from all ranks, and go back to them.

    Args:
        region: in the graph that is changed.
        degree: the number of ranks.
    """

    def __init__(self, region: ExpertRegion, degree: int) -> None:
        self.region = region
        self.degree = degree
        self.graph = region.products[0].graph
        self.entered: dict[fx.Node, fx.Node] = {}
        offsets, rows = region.offsets, rows_of(region.products[0])
        self.rows = rows
        with self.graph.inserting_after(offsets or rows):
            if offsets is None:
                self.counts = self._call(batch_counts, (rows, EXPERT_AXIS), rows)
                num_experts = region.rows[0]
            else:
                self.counts = self._call(expert_counts, (offsets, EXPERT_AXIS), offsets)
                (num_experts,) = shape_of(offsets)
        self.counts.meta["tensor"] = TensorMeta((degree, num_experts), torch.int64)

    def rewrite(self) -> None:
        """Exchange what enters and leaves, and give the products the rows of all ranks."""
        region = self.region
        for node in region.inside:
            if node in region.lookups:
                self._look_up(node)
                continue
            for operand in region.entering(node):
                node.replace_input_with(operand, self._enter(operand, node))
            for operand in region.of_experts(node):
                node.replace_input_with(operand, self._own_values(operand, node))
            if node in region.products and region.offsets is not None:
                node.replace_input_with(region.offsets, self._ends(node))
                if family(node.target) in SEPARATE_GEMMS:
                    node.target, node.args = own_grouped_linear, (*node.args, EXPERT_AXIS)
            elif family(node.target) in RESHAPES:
                self._free_rows(node)
        for node in list(region.leaving()):
            self._leave(node)
        if region.offsets is None:
            for node in (*region.inside, *self.entered.values()):
                node.meta["tensor"] = self._resized(node.meta["tensor"])

    def _enter(self, operand: fx.Node, reader: fx.Node) -> fx.Node:
        if operand not in self.entered:
            with self.graph.inserting_before(reader):
                args = (operand, self.counts, EXPERT_AXIS)
                step = to_experts if self.region.offsets is not None else batches_to_experts
                self.entered[operand] = self._call(step, args, operand)
        return self.entered[operand]

    def _own_values(self, operand: fx.Node, reader: fx.Node) -> fx.Node:
        """What a value that has one row for each expert has for the rank's own experts."""
        with self.graph.inserting_before(reader):
            own = self._call(own_experts, (operand, EXPERT_AXIS), operand)
        placed = Shard(0, (self.region.rows[0],))
        own.meta["tensor"] = local_meta(operand.meta["tensor"], placed, self.degree)
        return own

    def _ends(self, reader: fx.Node) -> fx.Node:
        """Where the rows of the own experts end, among those of all ranks."""
        offsets = self.region.offsets
        assert offsets is not None
        if offsets not in self.entered:
            with self.graph.inserting_before(reader):
                args = (offsets, self.counts, EXPERT_AXIS)
                ends = self.entered[offsets] = self._call(own_offsets, args, offsets)
            placed = Shard(0, shape_of(offsets))
            ends.meta["tensor"] = local_meta(offsets.meta["tensor"], placed, self.degree)
        return self.entered[offsets]

    def _leave(self, node: fx.Node) -> None:
        step = from_experts if self.region.offsets is not None else batches_from_experts
        with self.graph.inserting_after(node):
            args = (node, self.counts, math.prod(self.region.rows), EXPERT_AXIS)
            left = self._call(step, args, node)
        inside = self.region.inside
        node.replace_all_uses_with(left, lambda user: user not in inside and user is not left)

    def _look_up(self, node: fx.Node) -> None:
        """Values that are picked for the rows of this rank's own experts, of all ranks."""
        if family(node.target) in SEPARATE_EXPERTS:
            _, values, _, *rest = node.args
            rows = self._enter(self.rows, node)  # for their number
            node.args = (rows, values, self._ends(node), *rest, EXPERT_AXIS)
            node.target = own_grouped_values
            return
        node.args = (node.args[0], self.counts, self.region.rows[0], EXPERT_AXIS)
        node.kwargs = {}
        node.target = value_of_each_row

    def _call(self, target: Callable[..., Any], args: tuple[Any, ...], like: fx.Node) -> fx.Node:
        new = self.graph.call_function(target, args)
        new.meta = {**like.meta, "origin": like.name}
        return new

    def _free_rows(self, node: fx.Node) -> None:
        """Leave the number of rows of a reshaped value to what it is computed of."""
        sizes = node.args[1] if len(node.args) > 1 else None
        num_dims = len(self.region.rows)
        if isinstance(sizes, (list, tuple)) and tuple(sizes[:num_dims]) == self.region.rows:
            own = [size // self.degree for size in self.region.rows[:-1]]
            node.args = (node.args[0], [*own, -1, *sizes[num_dims:]], *node.args[2:])

    def _resized(self, meta: Any) -> Any:
        """A value of batches on a rank: of fewer experts, with the rows that all ranks have."""
        if isinstance(meta, tuple):
            return tuple(self._resized(own) for own in meta)
        num_experts, num_rows = self.region.rows
        if meta.shape[:2] != self.region.rows:
            return meta
        sizes = (num_experts // self.degree, num_rows * self.degree, *meta.shape[2:])
        return replace(meta, shape=sizes)
