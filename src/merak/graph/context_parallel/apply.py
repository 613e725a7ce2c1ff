"""Context parallelism as a second rewriting of each segment, behind that of tensor parallelism.

The ranks of the axis hold the same parameters and read the same samples; each computes its share of
the tokens. What a rank gives as the gradient of a parameter is its summand: the reduction over all
replicas sums them, as over data parallel ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace

from merak.core.errors import ShardError
from merak.core.shards import ParameterShard
from merak.core.tensor_meta import TensorMeta
from merak.graph.context_parallel.arranged import counts_up
from merak.graph.context_parallel.propagate import (
    ContextPropagation,
    propagate_tokens,
    rewrite_tokens,
)
from merak.graph.context_parallel.shared_heads import repeat_shared_heads
from merak.graph.context_parallel.shifted_losses import read_all_tokens
from merak.graph.ir.ir import Kind, ModelGraph, Segment, returned_nodes
from merak.graph.ir.operators import family
from merak.graph.tensor_parallel.apply import TensorParallel
from merak.graph.tensor_parallel.placement import REPLICATE, Placement, local_meta, where


@dataclass(frozen=True, slots=True, eq=False)
class ContextParallel:
    """Rewriting of a model's segments into those of a rank that has a share of the tokens.

    Args:
        degree: the number of ranks that share tokens.
        tensor: what tensor parallelism does to segments before; None for nothing.
        local: the segments before this rewriting, of the graph that `fit` has seen.
        found: how they run on tokens.
    """

    degree: int
    tensor: TensorParallel | None = None
    local: Mapping[int, tuple[Segment, dict[str, ParameterShard]]] = field(default_factory=dict)
    found: Mapping[int, ContextPropagation] = field(default_factory=dict)

    def fit(self, model: ModelGraph) -> tuple[ModelGraph, ContextParallel]:
        """Plan of the rewriting for a graph of the model, which is traced anew for every shape.

        Args:
            model: traced at any shapes; its segments are those that are rewritten afterwards.

        Returns:
            The graph, whose `values` are what a rank holds of them, and what rewrites its segments.
        """
        graph, tensor = (model, None) if self.tensor is None else self.tensor.fit(model)
        lengths = {n for n in token_lengths(model) if n % self.degree == 0}
        returned = frozenset(graph.outputs.values())
        values: dict[str, Placement] = {}
        local, found = {}, {}
        prologue = zip(graph.prologue.outputs, returned_nodes(graph.prologue.graph), strict=True)
        counting = frozenset(name for name, node in prologue if counts_up(node))
        for segment in graph.segments:
            own, shards = (segment, {}) if tensor is None else tensor(segment)
            nodes = repeat_shared_heads(read_all_tokens(own.graph, lengths), self.degree)
            entering = {
                node: values[node.meta["name"]]
                for node in nodes.find_nodes(op="placeholder")
                if node.meta["kind"] is Kind.VALUE and node.meta["name"] in values
            }
            outputs = list(zip(segment.outputs, returned_nodes(nodes), strict=True))
            whole = {node for name, node in outputs if name in returned}
            planned = propagate_tokens(nodes, entering, whole, lengths, self.degree, counting)
            values |= {name: planned.propagation.leaving(node) for name, node in outputs}
            local[segment.index] = replace(own, graph=nodes), shards
            found[segment.index] = planned
        metas = {n: self._local(graph.values[n], values.get(n)) for n in graph.values}
        fitted = replace(graph, values=metas)
        return fitted, replace(self, tensor=tensor, local=local, found=found)

    def _local(self, meta: TensorMeta, placed: Placement | None) -> TensorMeta:
        own: TensorMeta = local_meta(meta, REPLICATE if placed is None else placed, self.degree)
        return own

    def __call__(self, segment: Segment) -> tuple[Segment, dict[str, ParameterShard]]:
        """Rewrite one segment of the graph that `fit` has seen.

        Args:
            segment: of the model; left as it is.

        Returns:
            The segment that every rank runs, and the layout of the parameters that are split.
        """
        own, shards = self.local[segment.index]
        graph = rewrite_tokens(own.graph, self.found[segment.index], self.degree)
        return replace(own, graph=graph), shards

    def like(self, segment: Segment) -> Hashable:
        """The segment itself: no other is known to be rewritten in the same way."""
        return segment


def token_lengths(model: ModelGraph) -> set[int]:
    """Numbers of tokens of a batch's columns: their second sizes; images have none."""
    return {meta.shape[1] for meta in model.columns.values() if len(meta.shape) in (2, 3)}


def context_parallel(
    model: ModelGraph, tensor: TensorParallel | None, degree: int
) -> ContextParallel:
    """Context parallelism of a model.

    Args:
        model: the traced model.
        tensor: its tensor parallelism.
        degree: the number of ranks that share tokens.

    Raises:
        ShardError: the tokens cannot be shared out.
    """
    if tensor is not None and tensor.sequence and tensor.auto_sharder.degree > 1:
        raise ShardError(
            f"sequence_parallel=True shares out tokens over "
            f"tp={tensor.auto_sharder.degree}, and cp={degree} "
            "already does; leave one of them out."
        )
    lengths = sorted(token_lengths(model))
    if not any(n % degree == 0 for n in lengths):
        if not lengths:
            raise ShardError(
                f"cp={degree} shares out the tokens of each sample, but no column of the batch has "
                f"tokens; use cp=1, and the {degree} ranks for dp, tp or pp."
            )
        have = " and ".join(map(str, lengths))
        raise ShardError(
            f"cp={degree} shares out the tokens of each sample, but the batch has {have} tokens a "
            f"sample; pad to a multiple of {degree} (pad_to_multiple_of of the data collator), or "
            "use cp=1."
        )
    parallel = ContextParallel(degree, tensor)
    _, fitted = parallel.fit(model)
    products = [on for found in fitted.found.values() for on in found.products.values()]
    if not any(products):
        raise ShardError(
            f"cp={degree} finds no product with weights that runs on a rank's own tokens: this "
            f"model mixes tokens everywhere; use cp=1, and the {degree} ranks for dp, tp or pp."
        )
    return parallel


def gathered_operators(model: ModelGraph, parallel: ContextParallel) -> str | None:
    """A sentence about the operators that every rank computes for all tokens; None without any.

    Args:
        model: the traced model.
        parallel: its context parallelism.
    """
    _, fitted = parallel.fit(model)
    gathered = [node for found in fitted.found.values() for node in found.gathered]
    if not gathered:
        return None
    places, first = Counter(family(node.target) for node in gathered), gathered[0]
    listed = ", ".join(f"{number} × {name}" for name, number in places.most_common(5))
    return (
        f"cp={parallel.degree}: every rank gathers all tokens for {listed}, the first at "
        f"{first.name} ({where(first)})."
    )
