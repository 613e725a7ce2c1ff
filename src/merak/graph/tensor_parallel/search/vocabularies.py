"""Vocabularies that tensor parallelism shards: tables that rows are looked up in, and heads.

A vocabulary is split where that saves more than it costs. What splitting a block is worth is known
(`search`); a vocabulary is worth as much for every number it holds. It costs the
collectives that all segments which read it then run: a sum of the looked-up rows, the gradient of
what enters the head, and a few numbers for each position in the loss. So large vocabularies are
split, tied or not, and those that are small beside the blocks stay whole. So do those whose logits
something must see all together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from merak.graph.ir.ir import Kind, ModelGraph, Segment, returned_nodes
from merak.graph.ir.operators import is_embedding, is_weight_gemm
from merak.graph.ir.reachable import reachable
from merak.graph.tensor_parallel.placement import Placement, Shard, shape_of
from merak.graph.tensor_parallel.propagate import vocabulary_dim, weight_dims
from merak.graph.tensor_parallel.search.cost import Collective, active_share, parameter_nodes
from merak.graph.tensor_parallel.search.search import (
    SAVED_PER_BLOCK,
    Found,
    Search,
)
from merak.graph.tensor_parallel.search.segment_facts import activation_tokens


def split_vocabularies(
    model: ModelGraph, degree: int, given: Mapping[str, Placement], replicated: frozenset[str]
) -> dict[str, Shard]:
    """Placements of the sharded vocabularies, each with the biases of its head.

    Args:
        model: the traced model.
        degree: the number of ranks.
        given: weights whose split is given, by name.
        replicated: parameters that are not to be split.

    Returns:
        The split parameters by name, without those that are given.
    """
    shapes = {n: model.parameters[n].shape for n in vocabularies(model)}
    sizes = {n: math.prod(shape) for n, shape in shapes.items() if len(shape) > 1}
    unit = _block_size(model.segments, sizes) / SAVED_PER_BLOCK
    chosen: dict[str, Placement] = dict(given)
    for name in sorted(sizes.keys() - replicated, key=lambda n: (-sizes[n], n)):
        if name in given or sizes[name] >= unit:
            group = _Group(model, degree, name, chosen, replicated)
            chosen |= group.followers() if name in given else group.priced(sizes[name] / unit)
    return {n: p for n, p in chosen.items() if n not in given and isinstance(p, Shard)}


@dataclass(frozen=True, slots=True)
class _Group:
    """Vocabulary, with the biases and readers that are sharded with it.

    Args:
        model: the traced model.
        degree: the number of ranks.
        name: the parameter.
        chosen: what is split already.
        replicated: parameters that are not to be split.
    """

    model: ModelGraph
    degree: int
    name: str
    chosen: Mapping[str, Placement]
    replicated: frozenset[str]

    def priced(self, worth: float) -> dict[str, Placement]:
        """Group where sharding it is worth more than it costs; else None."""
        placed = self.placed()
        if placed is None or self.is_inner(placed):
            return {}
        group: dict[str, Placement] = {self.name: placed, **self.followers({self.name: placed})}
        cost = 0.0
        for segment in self.readers():
            search = self.search(segment)
            before, after = (
                search.judge({n: p for n, p in weights.items() if n in search.nodes})
                for weights in (self.chosen, {**self.chosen, **group})
            )
            if before is None or after is None or not search.runs(after.weights):
                return {}
            if _gathers(after) > _gathers(before):
                return {}  # all logits would be in one place again
            cost += sum(map(search.price, after.transfers))
            cost -= sum(map(search.price, before.transfers))
        return group if cost < worth else {}

    def placed(self) -> Shard | None:
        """Placement of the vocabulary; None where segments use it in different ways."""
        nodes = [parameter_nodes(segment.graph)[self.name] for segment in self.readers()]
        dims = {vocabulary_dim(node) for node in nodes}
        dim = dims.pop() if len(dims) == 1 else None
        if dim is None:
            return None
        return Shard(dim, (self.model.parameters[self.name].shape[dim],), self.name)

    def is_inner(self, placed: Shard) -> bool:
        """Whether a block that the loss reads directly is better split with this as its last part.

        Such a block's inner values are split, and its last product sums over them.
        """
        if self.name in embeddings(self.model):
            return False
        for segment in self.readers():
            own = {n: p for n, p in self.chosen.items() if n in segment.parameters}
            free = Search(segment, self.model.parameters, self.degree, self.replicated, own).run()
            if free.weights.get(self.name, placed) != placed:
                return True
        return False

    def followers(self, group: Mapping[str, Placement] | None = None) -> dict[str, Placement]:
        """Biases that the head adds to sharded outputs."""
        split = {**self.chosen, **(group or {})}
        lead = split[self.name]
        found: dict[str, Placement] = {}
        for segment in self.readers():
            search = self.search(segment)
            own = {n: p for n, p in split.items() if n in search.nodes}
            for name, placed in search.close(own).items():
                is_bias = len(self.model.parameters[name].shape) == 1 and name not in split
                if is_bias and isinstance(placed, Shard) and isinstance(lead, Shard):
                    found |= {name: placed} if placed.parts == lead.parts else {}
        return found

    def readers(self) -> list[Segment]:
        """Segments that read the vocabulary."""
        return [s for s in self.model.segments if self.name in s.parameters]

    def search(self, segment: Segment) -> Search:
        """Search over one segment in which only parameters of one dim are free."""
        parameters = self.model.parameters
        replicated = self.replicated | {
            n for n in segment.parameters if len(parameters[n].shape) > 1
        }
        own = {n: p for n, p in self.chosen.items() if n in segment.parameters}
        return Search(segment, parameters, self.degree, replicated, own)


def _gathers(found: Found) -> int:
    return sum(transfer.kind is Collective.GATHER for transfer in found.transfers)


def _block_size(segments: Sequence[Segment], vocabularies: Iterable[str]) -> float:
    """Mean number of weights that a token is multiplied with in a segment, vocabularies aside."""
    aside = frozenset(vocabularies)
    sizes = []
    for segment in segments:
        nodes = parameter_nodes(segment.graph)
        gemms = [n for name, n in nodes.items() if name not in aside and weight_dims(n)]
        tokens = activation_tokens(segment)
        sizes.append(sum(math.prod(shape_of(n)) * active_share(n, tokens) for n in gemms))
    blocks = [size for size in sizes if size]
    return sum(blocks) / len(blocks) if blocks else 1.0


def vocabularies(model: ModelGraph) -> set[str]:
    """Tables and heads, with the heads' biases."""
    return embeddings(model) | loss_weights(model)


def embeddings(model: ModelGraph) -> set[str]:
    """Parameters in which rows are looked up."""
    return {
        node.args[0].meta["name"]
        for segment in model.segments
        for node in segment.graph.nodes
        if node.op == "call_function" and is_embedding(node)
    }


def loss_weights(model: ModelGraph) -> set[str]:
    """Weights whose products the loss reads, with no other product in between."""

    def is_product(node: fx.Node) -> bool:
        return node.op == "call_function" and is_weight_gemm(node)

    found: set[str] = set()
    for segment in model.segments:
        returned = dict(zip(segment.outputs, returned_nodes(segment.graph), strict=True))
        losses = [returned[model.loss]] if model.loss in returned else []
        read = reachable(losses, lambda n: () if is_product(n) else n.all_input_nodes)
        found.update(*map(_parameters_of, filter(is_product, read)))
    return found


def _parameters_of(node: fx.Node) -> set[str]:
    """Parameters that a product reads, directly or through views of them."""
    found: set[str] = set()
    for source in node.all_input_nodes:
        while source.op == "call_function" and len(source.all_input_nodes) == 1:
            (source,) = source.all_input_nodes
        if source.meta.get("kind") is Kind.PARAMETER:
            found.add(source.meta["name"])
    return found
