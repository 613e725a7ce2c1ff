"""Expert parallelism over replicas as a last rewriting of each segment.

The ranks of the axis read other samples, or other tokens, and hold the same parameters but for
their experts. Each sends the rows of other ranks' experts to them, and computes its own experts'
rows of all ranks; what a rank gives as the gradient of its experts is of all these. With a factor
of capacity each expert has a fixed number of places for rows of each rank, also on one rank alone.

Source: GShard (arXiv 2006.16668, section 3.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from merak.core.errors import ShardError
from merak.core.shards import ParameterShard
from merak.core.tensor_meta import TensorMeta
from merak.graph.context_parallel.apply import ContextParallel
from merak.graph.expert_parallel.rows import ExpertRegion, expert_regions, rows_of
from merak.graph.ir.ir import ModelGraph, Segment
from merak.graph.ir.operators import (
    GROUPED_GEMMS,
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
from merak.graph.tensor_parallel.placement import Shard, local_meta, shape_of, where
from merak.graph.tensor_parallel.propagate import permuted_dims
from merak.graph.tensor_parallel.search.cost import parameter_nodes
from merak.graph.tensor_parallel.search.experts import (
    check_experts,
    computed_stacks,
    experts_of,
    refuse_other_readers,
)
from merak.graph.tensor_parallel.search.no_experts import no_experts
from merak.ops.expert_capacity import (
    batches_from_places,
    batches_to_places,
    ends_of_places,
    expert_capacity,
    from_places,
    to_places,
    value_of_each_place,
)
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
        capacity: the factor of `ops.expert_capacity`; None where no row is dropped.
    """

    degree: int
    context: ContextParallel | None = None
    capacity: float | None = None

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
        graph = _spread(own.graph, placed, self.degree, self.capacity)
        if self.degree == 1:
            return replace(own, graph=graph), {}
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


def exact(rewrite: LocalRewrite | None) -> LocalRewrite | None:
    """A rewriting without capacities, which drops no row: that of evaluations.

    Args:
        rewrite: that of training.
    """
    if not isinstance(rewrite, ExpertParallel) or rewrite.capacity is None:
        return rewrite
    return rewrite.context if rewrite.degree == 1 else replace(rewrite, capacity=None)


def with_experts(
    model: ModelGraph,
    tensor: TensorParallel | None,
    context: ContextParallel | None,
    ep: int,
    capacity: float | None,
) -> LocalRewrite | None:
    """What makes a model's segments those of one rank.

    Args:
        model: the traced model.
        tensor: its tensor parallelism, which has experts of its own.
        context: its context parallelism.
        ep: the expert parallel degree.
        capacity: the option `expert_capacity`.

    Raises:
        ShardError: the model has no experts for them, or they are split over tp.
    """
    if capacity is not None and tensor is not None:
        raise ShardError(
            f"expert_capacity={capacity:g} gives experts places for the rows of each replica, but "
            "tensor parallel ranks have the same rows; use tp=1, or expert_capacity=None."
        )
    if tensor is not None or (ep == 1 and capacity is None):
        return context or tensor
    return expert_parallel(model, context, ep, capacity)


def expert_parallel(
    model: ModelGraph, context: ContextParallel | None, degree: int, capacity: float | None = None
) -> ExpertParallel:
    """Expert parallelism of a model over its replicas.

    Args:
        model: the traced model.
        context: its context parallelism.
        degree: the number of replicas that have the experts of a layer between them.
        capacity: as of `ExpertParallel`.

    Raises:
        ShardError: there are no experts, the degree does not divide their number, or something else
            reads their weights.
    """
    found = {n: w for segment in model.segments for n, w in experts_of(segment).items()}
    for name, weight in found.items():
        check_experts(name, weight.num_experts, degree)
    if not found:
        raise no_experts(model, degree, capacity)
    if degree > 1:
        refuse_other_readers(model, degree)
    return ExpertParallel(degree, context, capacity)


def spread_weights(model: ModelGraph) -> frozenset[str]:
    """Names of the parameters that expert parallelism shares out over replicas."""
    return frozenset(name for segment in model.segments for name in experts_of(segment))


def _spread(
    graph: fx.Graph, experts: Mapping[str, Shard], degree: int, capacity: float | None
) -> fx.Graph:
    """Graph of a rank with some of the experts."""
    new, _ = copy_graph(graph)
    weights, computed = parameter_nodes(new), computed_stacks(new)
    for node, (_, placed) in computed.items():
        _shrink_computed(node, placed, degree)
    for name, placed in experts.items():
        if weights[name] not in computed:
            _shrink(weights[name], placed, degree)
    of_experts = {weights[name] for name in experts} | computed.keys()
    for region in expert_regions(new, of_experts, batches=degree > 1):
        if capacity is None:
            _Exchange(region, degree).rewrite()
        else:
            _Places(region, degree, capacity).rewrite()
    if capacity is not None:
        _keep_order(new)
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


def _shrink_computed(node: fx.Node, placed: Shard, degree: int) -> None:
    """Give a value of which stacks are computed the sizes of a rank's part."""
    sizes = node.args[1] if len(node.args) > 1 else None
    if family(node.target) in RESHAPES and isinstance(sizes, (list, tuple)):
        own = list(sizes)
        if own[placed.dim] != -1:
            own[placed.dim] = shape_of(node)[placed.dim] // degree
        node.args = (node.args[0], own, *node.args[2:])
    node.meta = {**node.meta, "tensor": local_meta(node.meta["tensor"], placed, degree)}


_Called = tuple[Callable[..., Any], tuple[Any, ...]]


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
        self.ends: fx.Node | None = None
        self.rows = rows_of(region.products[0])
        if region.offsets is None:
            self.num_experts = region.rows[0]
        else:
            (self.num_experts,) = shape_of(region.offsets)
        self.begin()

    def begin(self) -> None:
        """Exchange the numbers of rows."""
        offsets, rows = self.region.offsets, self.rows
        with self.graph.inserting_after(offsets or rows):
            if offsets is None:
                self.counts = self._call(batch_counts, (rows, EXPERT_AXIS), rows)
            else:
                self.counts = self._call(expert_counts, (offsets, EXPERT_AXIS), offsets)
        self.counts.meta["tensor"] = TensorMeta((self.degree, self.num_experts), torch.int64)

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
                self._multiply(node)
            elif family(node.target) in RESHAPES:
                self._free_rows(node)
        for node in list(region.leaving()):
            self._leave(node)
        self.finish()

    def finish(self) -> None:
        """Give what is inside its sizes."""
        if self.region.offsets is None:
            num_experts, num_rows = self.region.rows
            self._resize((num_experts // self.degree, num_rows * self.degree))

    def entry(self, operand: fx.Node) -> _Called:
        """The call that brings a value to the experts."""
        step = to_experts if self.region.offsets is not None else batches_to_experts
        return step, (operand, self.counts, EXPERT_AXIS)

    def exit(self, node: fx.Node) -> _Called:
        """The call that brings a value back."""
        step = from_experts if self.region.offsets is not None else batches_from_experts
        return step, (node, self.counts, math.prod(self.region.rows), EXPERT_AXIS)

    def picked(self, values: Any) -> _Called:
        """The call that gives each row the value of its expert."""
        return value_of_each_row, (values, self.counts, self.region.rows[0], EXPERT_AXIS)

    def own_ends(self) -> _Called:
        """The call that says where the rows of the own experts end, among those of all ranks."""
        return own_offsets, (self.region.offsets, self.counts, EXPERT_AXIS)

    def _multiply(self, node: fx.Node) -> None:
        assert self.region.offsets is not None
        node.replace_input_with(self.region.offsets, self._ends(node))
        if family(node.target) in SEPARATE_GEMMS:
            node.target, node.args = own_grouped_linear, (*node.args, EXPERT_AXIS)

    def _enter(self, operand: fx.Node, reader: fx.Node) -> fx.Node:
        if operand not in self.entered:
            with self.graph.inserting_before(reader):
                self.entered[operand] = self._call(*self.entry(operand), operand)
        return self.entered[operand]

    def _own_values(self, operand: fx.Node, reader: fx.Node) -> fx.Node:
        """What a value that has one row for each expert has for the rank's own experts."""
        with self.graph.inserting_before(reader):
            own = self._call(own_experts, (operand, EXPERT_AXIS), operand)
        placed = Shard(0, (self.region.rows[0],))
        own.meta["tensor"] = local_meta(operand.meta["tensor"], placed, self.degree)
        return own

    def _ends(self, reader: fx.Node) -> fx.Node:
        offsets = self.region.offsets
        assert offsets is not None
        if self.ends is None:
            with self.graph.inserting_before(reader):
                self.ends = self._call(*self.own_ends(), offsets)
            placed = Shard(0, shape_of(offsets))
            self.ends.meta["tensor"] = local_meta(offsets.meta["tensor"], placed, self.degree)
        return self.ends

    def _leave(self, node: fx.Node) -> None:
        with self.graph.inserting_after(node):
            left = self._call(*self.exit(node), node)
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
        node.target, node.args = self.picked(node.args[0])
        node.kwargs = {}

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

    def _resize(self, sizes: tuple[int, ...]) -> None:
        """Note other sizes in front of what is inside, and of what enters it."""
        before = self.region.rows

        def resized(meta: Any) -> Any:
            if isinstance(meta, tuple):
                return tuple(map(resized, meta))
            if meta.shape[: len(before)] != before:
                return meta
            return replace(meta, shape=(*sizes, *meta.shape[len(before) :]))

        for node in (*self.region.inside, *self.entered.values()):
            node.meta["tensor"] = resized(node.meta["tensor"])


class _Places(_Exchange):
    """Rewriting of one region whose experts have a fixed number of places for each rank's rows.

    Batches that a model lays out itself have such sizes already.

    Args:
        region: in the graph that is changed.
        degree: the number of ranks.
        capacity: the factor of `ops.expert_capacity`.
    """

    def __init__(self, region: ExpertRegion, degree: int, capacity: float) -> None:
        self.capacity = capacity
        super().__init__(region, degree)

    def begin(self) -> None:
        """Count the places, by shapes alone."""
        rows = self.region.rows
        is_laid_out = self.region.offsets is None
        self.size = (
            rows[1] if is_laid_out else expert_capacity(rows[0], self.num_experts, self.capacity)
        )
        self.num_own = self.num_experts // self.degree

    def finish(self) -> None:
        """Give what is inside its sizes, and multiply in batches."""
        if self.region.offsets is None:
            super().finish()
            return
        self._resize((self.num_experts * self.size,))
        for node in self.region.products:
            if family(node.target) in GROUPED_GEMMS:
                self._batch(node)

    def entry(self, operand: fx.Node) -> _Called:
        """The call that brings a value to the experts."""
        if self.region.offsets is None:
            return batches_to_places, (operand, self.degree, EXPERT_AXIS)
        return to_places, (operand, *self._how())

    def exit(self, node: fx.Node) -> _Called:
        """The call that brings a value back."""
        if self.region.offsets is None:
            return batches_from_places, (node, self.degree, EXPERT_AXIS)
        return from_places, (node, *self._how())

    def picked(self, values: Any) -> _Called:
        """The call that gives each place the value of its expert."""
        return value_of_each_place, (values, self.degree * self.size)

    def own_ends(self) -> _Called:
        """The call that says where the places of the own experts end."""
        return ends_of_places, (self.num_own, self.degree * self.size)

    def _how(self) -> tuple[Any, ...]:
        return self.region.offsets, self.size, self.region.rows[0], self.degree, EXPERT_AXIS

    def _multiply(self, node: fx.Node) -> None:
        if family(node.target) in SEPARATE_GEMMS:
            super()._multiply(node)

    def _batch(self, product: fx.Node) -> None:
        """Make a batch of equal products of a grouped one."""
        rows, weight = product.args[:2]
        assert isinstance(rows, fx.Node)
        meta, width = product.meta["tensor"], shape_of(rows)[1]
        if meta.dtype != rows.meta["tensor"].dtype:
            raise ShardError(
                f"expert_capacity multiplies experts' rows in their own type, but {product.name} "
                f"({where(product)}) gives {meta.dtype}; use expert_capacity=None."
            )
        places = (self.num_own, self.degree * self.size)
        with self.graph.inserting_before(product):
            batch = self._call(torch.ops.aten.view.default, (rows, [*places, width]), rows)
        batch.meta["tensor"] = replace(rows.meta["tensor"], shape=(*places, width))
        product.target, product.args, product.kwargs = (
            torch.ops.aten.bmm.default,
            (batch, weight),
            {},
        )
        product.meta["tensor"] = replace(meta, shape=(*places, meta.shape[1]))
        with self.graph.inserting_after(product):
            args = (product, [math.prod(places), meta.shape[1]])
            flat = self._call(torch.ops.aten.view.default, args, product)
        flat.meta["tensor"] = meta
        product.replace_all_uses_with(flat, lambda user: user is not flat)


def _keep_order(graph: fx.Graph) -> None:
    """Sort so that rows of an expert keep the order of their tokens: the last ones are dropped."""
    aten = torch.ops.aten
    stable = {aten.sort.default: aten.sort.stable, aten.argsort.default: aten.argsort.stable}
    for node in graph.nodes:
        if node.target in stable:
            named = dict(zip(("dim", "descending"), node.args[1:], strict=False))
            node.args, node.kwargs = node.args[:1], {"stable": True, **named, **node.kwargs}
            node.target = stable[node.target]
