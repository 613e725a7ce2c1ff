"""Propagation of placements: from the weights through a segment, operator by operator."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from merak.core.errors import ShardError
from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.contractions import contraction
from merak.graph.ir.ir import Kind, Segment
from merak.graph.ir.mutation import mutated_arguments
from merak.graph.ir.operators import (
    GEMMS,
    MATMULS,
    NARROWS,
    RESHAPES,
    SPLITS,
    family,
    weights_only,
)
from merak.graph.tensor_parallel.alias_check import refuse_lost_writes
from merak.graph.tensor_parallel.features import Attribute, Column, Replicate, Row, Vocabulary
from merak.graph.tensor_parallel.placement import (
    AXIS,
    REPLICATE,
    Decision,
    Operator,
    PartlySharded,
    Placement,
    ResultPlacement,
    Shard,
    argument,
    positive,
    shape_of,
)
from merak.graph.tensor_parallel.reductions import early_reductions
from merak.graph.tensor_parallel.rules.rules import decide
from merak.graph.tensor_parallel.rules.views import split_dims


@dataclass(frozen=True, slots=True)
class Propagation:
    """Placements of a segment's values, and the decisions about its operators.

    Args:
        placements: by node of the segment's graph, before operands are converted.
        decisions: by operator.
        outputs: how results leave the segment that do not leave it whole.
        scatters: whether a sum becomes sharded by a reduce-scatter, and shards that enter split
            work
            become whole by an all-gather whose backward is one; else through whole values.
        exchanges: whether shards along one dim become shards along another by an all-to-all.
        degree: the number of ranks.
    """

    placements: Mapping[fx.Node, ResultPlacement]
    decisions: Mapping[fx.Node, Decision]
    outputs: Mapping[fx.Node, Placement] = field(default_factory=dict)
    scatters: bool = False
    exchanges: bool = False
    degree: int = 1

    def leaving(self, node: fx.Node) -> Placement:
        """Placement of a result of the segment."""
        return self.outputs.get(node, REPLICATE)


def propagate(
    graph: fx.Graph,
    weights: Mapping[str, Placement],
    degree: int,
    rule: Callable[[Operator], Decision] = decide,
    inside: Collection[fx.Node] = (),
    entering: Mapping[fx.Node, Placement] = MappingProxyType({}),
) -> Propagation:
    """Propagate placements through a segment, with a decision for every operator.

    This is all that a search over assignments needs: it costs no tensors, and what a decision asks
    of operands (`Decision.needs`) are the collectives that it costs.

    Args:
        graph: the segment's operators.
        weights: placements of parameters, by name; replicated where not named.
        degree: the number of ranks.
        rule: decides about an operator; `decide_or_gather` where nothing may fail.
        inside: operators on whole values to count to the work that is split: then these values
            enter it instead of the results.
        entering: placements of values of other segments that are not replicated.

    Returns:
        Placements and decisions.

    Raises:
        ShardError: an operator that cannot work on what is split, or a write that would be lost.
    """
    return reduce_early(
        graph,
        lambda reduced: propagate_once(graph, weights, degree, rule, inside, entering, reduced),
    )


def reduce_early(graph: fx.Graph, run: Callable[[Collection[fx.Node]], Propagation]) -> Propagation:
    """Propagation in which partial sums are reduced where they are smallest.

    Args:
        graph: the segment's operators.
        run: propagates, given the sums that are reduced for all of their readers.
    """
    found = run(frozenset())
    reduced = early_reductions(graph, found.placements, found.decisions)
    return run(reduced) if reduced else found


def propagate_once(
    graph: fx.Graph,
    weights: Mapping[str, Placement],
    degree: int,
    rule: Callable[[Operator], Decision],
    inside: Collection[fx.Node],
    entering: Mapping[fx.Node, Placement],
    reduced: Collection[fx.Node],
    axis: str = AXIS,
) -> Propagation:
    """Propagate placements as `propagate` does, with the sums that are reduced given."""
    placements: dict[fx.Node, ResultPlacement] = {}
    decisions: dict[fx.Node, Decision] = {}
    by_storage: dict[int | None, set[ResultPlacement]] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and node.meta["kind"] is Kind.PARAMETER:
            placements[node] = weights.get(node.meta["name"], REPLICATE)
        elif node.op == "call_function":
            op = Operator(node, placements, degree, node in inside, by_storage, reduced, axis)
            decisions[node] = rule(op)
            placements[node] = decisions[node].result
        elif node.op != "output":
            placements[node] = entering.get(node, REPLICATE)
        if node.op != "output":
            by_storage.setdefault(node.meta.get("storage"), set()).add(placements[node])
    refuse_lost_writes(graph, placements, decisions)
    return Propagation(placements, decisions, degree=degree)


def decide_or_gather(op: Operator) -> Decision:
    """Decision about an operator; one that cannot work on shards gets replicated operands.

    Raises:
        ShardError: it writes into an operand, of which a whole copy would be of no use; or reads
            one of which only some parts are split.
    """
    return _decide_or_gather(op, PartlySharded)


def decide_or_gather_parts(op: Operator) -> Decision:
    """Decision as of `decide_or_gather`; what is split in some parts alone is gathered, too.

    The search keeps to `decide_or_gather`. This is for what it has not seen: another shape of the
    batch, or outputs of an evaluation.

    Raises:
        ShardError: it writes into an operand that is split.
    """
    return _decide_or_gather(op)


def _decide_or_gather(op: Operator, *refused: type) -> Decision:
    try:
        return decide(op)
    except ShardError:
        # What is written into is there on every rank: only what is written can be gathered.
        if any(op.placements.get(n) != REPLICATE for n in mutated_arguments(op.node)) or any(
            isinstance(op.raw(n), refused) for n in op.node.all_input_nodes
        ):
            raise
        return gather_operands(op)


def gather_operands(op: Operator) -> Decision:
    """Decision for an operator that runs on whole values, on every rank.

    Raises:
        ShardError: an operand that one rank alone has.
    """
    placed = {n: op.raw(n) for n in op.node.all_input_nodes}
    split = {n: p for n, p in placed.items() if isinstance(p, (Shard, PartlySharded))}
    if any(isinstance(p, Shard) and p.owner is not None for p in split.values()):
        raise op.error("needs a weight that one rank alone has")
    return Decision(REPLICATE, dict.fromkeys(split, REPLICATE))


def place_weights(
    segment: Segment, parameters: Mapping[str, TensorMeta], attributes: Mapping[str, Attribute]
) -> dict[str, Shard]:
    """Placements of a segment's parameters that a feature dict shards.

    Args:
        segment: the segment.
        parameters: what every parameter is, by name.
        attributes: from `resolve_features`.

    Returns:
        Placements by parameter name; replicated parameters are left out.

    Raises:
        ShardError: an attribute that does not fit the parameter or how the graph uses it.
    """
    placed: dict[str, Shard] = {}
    for node in segment.graph.find_nodes(op="placeholder"):
        if node.meta["kind"] is not Kind.PARAMETER:
            continue
        name = node.meta["name"]
        dim = _split_dim(node, name, len(parameters[name].shape), attributes.get(name))
        if dim is not None:
            attribute = attributes[name]
            relative = attribute.parts if isinstance(attribute, (Column, Row)) else (1,)
            parts = _part_sizes(name, parameters[name].shape[dim], relative)
            placed[name] = Shard(dim, parts, name)
    return placed


def _split_dim(node: fx.Node, name: str, num_dims: int, attribute: Attribute | None) -> int | None:
    if attribute is None or isinstance(attribute, Replicate):
        return None
    if isinstance(attribute, Vocabulary):
        found = vocabulary_dim(node)
        if found is None:
            raise ShardError(
                f"{name} cannot be split over a vocabulary: its rows are not looked up, nor are "
                "they the outputs of a head; give it another attribute in the feature dict."
            )
        return found
    if num_dims < 2:
        return 0 if isinstance(attribute, Column) and num_dims == 1 else None
    dims = weight_dims(node)
    sides = [out if isinstance(attribute, Column) else into for out, into in dims]
    if len(dims) != 1 or None in sides:
        how = "no matrix product multiplies by it" if not dims else "it is used in two ways"
        how = how if len(dims) != 1 else "its inputs are taken together before its product"
        raise ShardError(
            f"{name} cannot be a {type(attribute).__name__} weight: {how}; give it Replicate() in "
            "the feature dict, or leave it out."
        )
    return sides[0]


def vocabulary_dim(node: fx.Node) -> int | None:
    """Vocabulary dim of a parameter: the rows of a table, or the outputs of a product.

    Returns:
        The dim; None where it has no such dim, or several.
    """
    if len(node.meta["tensor"].shape) == 1:
        return 0
    found = {out for out, _ in weight_dims(node)}
    found |= {0 for user in node.users if family(user.target) == "embedding"}
    return found.pop() if len(found) == 1 else None


def weight_dims(node: fx.Node) -> tuple[tuple[int, int | None], ...]:
    """Output and input dims of a parameter, for every way in which GEMMs use it.

    Of several output dims, as of heads and what each has, the first. None for the input dim of a
    weight that is normalised over it before its product.
    """
    return first_dims(weight_ways(node, weights_only(node.graph)))


def first_dims(ways: Ways) -> tuple[tuple[int, int | None], ...]:
    """The first output dim of every way, and the first input dim; None where there is none."""
    return tuple((outs[0], ins[0] if ins else None) for outs, ins in ways)


Ways = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
"""All output dims, and all input dims, of a weight for every way in which GEMMs use it."""

_Dims = tuple[int | None, ...]
"""For every dim of a value, which dim of a parameter it is; None for another."""


def weight_ways(node: fx.Node, weights: Collection[fx.Node]) -> Ways:
    """Ways in which GEMMs use a parameter, each with an output dim of it at least.

    Args:
        node: the parameter.
        weights: values of its graph that depend on parameters and buffers alone.
    """
    dims: _Dims = tuple(range(len(shape_of(node))))
    found = _gemm_dims(node, dims, weights) if len(dims) > 1 else ()
    known = (tuple(tuple(d for d in own if d is not None) for own in way) for way in found)
    return tuple(dict.fromkeys((outs, ins) for outs, ins in known if outs))


def _gemm_dims(
    node: fx.Node, dims: _Dims, weights: Collection[fx.Node]
) -> Iterator[tuple[_Dims, _Dims]]:
    """Output and input dims of a weight in every GEMM that uses it.

    Args:
        node: the weight, or what is computed of it.
        dims: for every dim of `node`, which dim of the weight it is.
        weights: values that depend on parameters and buffers alone.
    """
    for user in node.users:
        if user in weights and user.op == "call_function" and family(user.target) not in GEMMS:
            for result, own in _computed_dims(user, node, dims):
                yield from _gemm_dims(result, own, weights)
        else:
            yield from _product_dims(user, node, dims)


def _computed_dims(user: fx.Node, node: fx.Node, dims: _Dims) -> Iterator[tuple[fx.Node, _Dims]]:
    """What an operator computes of a weight, and which dims of that are the weight's."""
    name = family(user.target)
    sources = split_dims(shape_of(node), shape_of(user)) if name in RESHAPES else None
    if sources is not None:
        yield user, tuple(dims[d] for d in sources)
        return
    if name in SPLITS:
        is_taken = name == "unbind"
        cut = positive(argument(user, "dim", 0), len(dims))
        for part in user.users:
            yield part, dims[:cut] + dims[cut + 1 :] if is_taken else dims
        return
    if name in NARROWS:
        yield user, dims
        return
    found: list[int | None] = [None] * len(shape_of(user))
    for place, dim in enumerate(dims):
        shard = Shard(place, (shape_of(node)[place],))
        placements = dict.fromkeys(user.all_input_nodes, REPLICATE) | {node: shard}
        with suppress(ShardError):
            placed = decide(Operator(user, placements, 1)).result
            if isinstance(placed, Shard) and found[placed.dim] is None:  # of merged dims, the first
                found[placed.dim] = dim
    yield user, tuple(found)


def _product_dims(product: fx.Node, node: fx.Node, dims: _Dims) -> Iterator[tuple[_Dims, _Dims]]:
    """Output and input dims of a weight in a product."""
    name = family(product.target)
    found = contraction(product) if product.op == "call_function" else None
    if found is None or name == "baddbmm":  # adapters of a stack of experts, which stays whole
        return
    nodes = [n for n, _ in found.factors]
    if name == "einsum" and (len(nodes) != 2 or nodes[0] is nodes[1]):
        return
    (x, of_x), (weight, of_weight), *_ = found.factors
    if x is node and name in MATMULS | {"einsum"} and weight is not node:
        own, other = of_x, of_weight
    elif node in nodes[1:]:
        own, other = of_weight, of_x
    else:
        return
    result, labels = found.result, list(zip(dims, own, strict=True))
    outputs = (dim for dim, label in labels if label in result and label not in other)
    inputs = (dim for dim, label in labels if label in other and label not in result)
    yield tuple(outputs), tuple(inputs)


def permuted_dims(node: fx.Node, dims: tuple[int, ...]) -> tuple[int, ...]:
    """Dims of a parameter behind a transposition of it, which tells by itself where they go."""
    sizes = range(2, len(dims) + 2)
    target: Any = node.target
    moved = target(torch.empty(tuple(sizes), device="meta"), *node.args[1:], **node.kwargs)
    return tuple(dims[sizes.index(size)] for size in moved.shape)


def _part_sizes(name: str, size: int, parts: tuple[int, ...]) -> tuple[int, ...]:
    total = sum(parts)
    if not parts or min(parts) < 1 or any(size * part % total for part in parts):
        raise ShardError(
            f"{name} has a size of {size}, which cannot be in parts of relative sizes {parts}; "
            "correct `parts` in the feature dict."
        )
    return tuple(size * part // total for part in parts)


def capacities(propagation: Propagation) -> dict[str, int]:
    """Number of pieces that the layers' sharded dims can be cut into.

    Follow what a weight splits through a propagation of degree 1: wherever its values are seen as
    heads, every fused part is a number of heads. What divides all of these numbers fits.

    Returns:
        By the parameter that starts the split, the greatest number of ranks that fits; so does
        whatever divides it.
    """
    found: dict[str, int] = {}
    for placed in propagation.placements.values():
        for each in placed if isinstance(placed, tuple) else (placed,):
            if isinstance(each, Shard):
                found[each.origin] = math.gcd(found.get(each.origin, 0), *each.parts)
    return found
