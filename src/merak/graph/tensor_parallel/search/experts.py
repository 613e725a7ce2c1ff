"""Weights of experts: those of products that have a weight a group.

Found by how the graph reads them: stacks of weights of grouped products, of batches of matrix
products and of einsums, values that are picked by the experts of a grouped product's rows,
parameters that such stacks are computed of, as adapters of experts are, and weights that every
expert has one of.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy  # type: ignore[import-untyped]
from torch import fx

from merak.core.errors import ShardError
from merak.graph.ir.contractions import contraction
from merak.graph.ir.ir import Kind, ModelGraph, Segment
from merak.graph.ir.operators import (
    GROUPED_GEMMS,
    MATMULS,
    RESHAPES,
    SAME_VALUES,
    SEPARATE_EXPERTS,
    TRANSPOSES,
    family,
    is_pointwise,
)
from merak.graph.tensor_parallel.placement import Shard, shape_of
from merak.graph.tensor_parallel.propagate import permuted_dims
from merak.graph.tensor_parallel.rules.experts import offsets_of
from merak.graph.tensor_parallel.search.cost import parameter_nodes


@dataclass(frozen=True, slots=True)
class ExpertWeight:
    """A parameter of experts, of which each rank has that of some experts.

    Args:
        num_experts: how many there are.
        dim: that of the experts in a stack; in a parameter of one expert, that along which it is
            empty on other ranks.
        parts: sizes along `dim` of its fused parts, each of which has some of every expert.
        expert: whose it is; None for a stack of all.
    """

    num_experts: int
    dim: int
    parts: tuple[int, ...]
    expert: int | None = None

    def placed(self, name: str, ep: int) -> Shard:
        """Placement on ranks that have equally many experts, in their order.

        Args:
            name: of the parameter.
            ep: the number of ranks, which divides that of experts.
        """
        owner = None if self.expert is None else self.expert // (self.num_experts // ep)
        return Shard(self.dim, self.parts, name, owner)


def num_experts(model: ModelGraph) -> int:
    """Number of experts that expert parallelism splits, of all layers' the greatest divisor.

    Args:
        model: the traced model.

    Returns:
        The number; 0 where there are no weights of experts.
    """
    weights = (w for segment in model.segments for w in experts_of(segment).values())
    return math.gcd(*(weight.num_experts for weight in weights))


def check_experts(name: str, num_experts: int, ep: int) -> None:
    """Refuse an expert parallel degree that does not divide the experts of a weight.

    Raises:
        ShardError: it does not.
    """
    if num_experts % ep:
        *most, last = map(str, sympy.divisors(num_experts))
        fitting = f"degrees that fit are {', '.join(most)} and" if most else "only one that fits is"
        raise ShardError(
            f"ep={ep} does not divide the number of experts of {name.rpartition('.')[0]}, which is "
            f"{num_experts}; the {fitting} {last}."
        )


def refuse_other_readers(model: ModelGraph, ep: int, *, only_separate: bool = False) -> None:
    """Refuse weights that another segment reads than that of their experts, as for a penalty.

    Args:
        model: the traced model.
        ep: the expert parallel degree.
        only_separate: whether stacks may be read, as those that are split are.

    Raises:
        ShardError: there are such.
    """
    by_segment = [experts_of(segment) for segment in model.segments]
    every = {name: weight for own in by_segment for name, weight in own.items()}
    for segment, own in zip(model.segments, by_segment, strict=True):
        for name in segment.parameters:
            is_shared_out = name in every and not (only_separate and every[name].expert is None)
            if is_shared_out and name not in own:
                raise ShardError(
                    f"ep={ep} gives every rank some of the experts, but {segment.name} reads "
                    f"{name} on all of them; use ep=1, with tp, pp or zero=2 where memory is short."
                )


def experts_of(segment: Segment) -> Mapping[str, ExpertWeight]:
    """Parameters of a segment that are of experts, by name."""
    nodes = parameter_nodes(segment.graph)
    dims = {name: _expert_dims(node) for name, node in nodes.items()}
    stacks = {
        name: ExpertWeight(size, dim, (size,))
        for name, own in dims.items()
        if len(own) == 1
        for dim in own
        for size in [shape_of(nodes[name])[dim]]
    }
    computed = {
        node.meta["name"]: ExpertWeight(count, placed.dim, placed.parts)
        for node, (count, placed) in computed_stacks(segment.graph).items()
        if node.op == "placeholder"
    }
    return stacks | computed | _separate_weights(nodes)


def computed_stacks(graph: fx.Graph) -> dict[fx.Node, tuple[int, Shard]]:
    """Values that stacks of grouped products are computed of, with the experts' dim of each.

    Args:
        graph: of a segment.

    Returns:
        Parameters, and what is computed of them up to the stacks, each with the number of experts
        and how these lie in it. Nothing of a stack that is a parameter itself, or of which
        something else reads a part.
    """
    found: dict[fx.Node, tuple[int, Shard]] = {}
    for product in graph.nodes:
        if product.op == "call_function" and family(product.target) in GROUPED_GEMMS:
            count, own = shape_of(product.args[1])[0], _computed_of(product)
            found |= {node: (count, placed) for node, placed in own.items()}
    return found


def _computed_of(product: fx.Node) -> dict[fx.Node, Shard]:
    weight = product.args[1]
    assert isinstance(weight, fx.Node)
    own: dict[fx.Node, Shard] = {}
    waiting = [(weight, Shard(0, shape_of(weight)[:1]))]
    while waiting:
        node, placed = waiting.pop()
        if own.setdefault(node, placed) != placed:
            return {}
        if node.op == "placeholder" and node.meta["kind"] is Kind.PARAMETER:
            continue
        operands = _before(node, placed) if node.op == "call_function" else None
        if operands is None:
            return {}
        waiting += operands
    readers = {user for node in own for user in node.users} - own.keys()
    shows = SAME_VALUES | TRANSPOSES
    is_stack = all(n.op == "placeholder" or family(n.target) in shows for n in own)
    return {} if is_stack or readers != {product} else own


def _before(node: fx.Node, placed: Shard) -> list[tuple[fx.Node, Shard]] | None:
    """The operands of which an operator computes parts, with theirs; None where it mixes them."""
    name, product = family(node.target), contraction(node)
    if product is not None:
        label = product.result[placed.dim]
        if len(placed.parts) > 1 or any(label not in labels for _, labels in product.operands):
            return None
        return [(n, replace(placed, dim=labels.index(label))) for n, labels in product.operands]
    operands = node.all_input_nodes
    if name in TRANSPOSES:
        (operand,), dims = operands, tuple(range(len(shape_of(node))))
        return [(operand, replace(placed, dim=permuted_dims(node, dims)[placed.dim]))]
    if name in RESHAPES and len(operands) == 1:
        before = _before_reshape(shape_of(operands[0]), shape_of(node), placed)
        return None if before is None else [(operands[0], before)]
    is_same = all(shape_of(operand) == shape_of(node) for operand in operands)
    if is_same and (name in SAME_VALUES or is_pointwise(node.target)):
        return [(operand, placed) for operand in operands]
    return None


def _before_reshape(before: tuple[int, ...], after: tuple[int, ...], placed: Shard) -> Shard | None:
    """How a value lies that a reshape shows with a sharded dim; None where that is in no dim."""
    if len(placed.parts) > 1:
        return None
    (size,), outside = placed.parts, math.prod(after[: placed.dim])
    for dim, length in enumerate(before):
        num_parts, rest = divmod(outside, math.prod(before[:dim]))
        if not rest and num_parts and length % (num_parts * size) == 0:
            return Shard(dim, (length // num_parts,) * num_parts)
    return None


def _separate_weights(nodes: Mapping[str, fx.Node]) -> dict[str, ExpertWeight]:
    """Parameters that every expert has one of, and that nothing else reads."""
    places = {name: _place_among_experts(node) for name, node in nodes.items()}
    counts = Counter(readers for readers, _ in filter(None, places.values()))
    found = {}
    for name, place in places.items():
        # An operator that reads one expert's from elsewhere reads all of them on every rank.
        if place is not None and all(counts[place[0]] == len(_listed(r)) for r in place[0]):
            size = shape_of(nodes[name])[0]
            found[name] = ExpertWeight(counts[place[0]], 0, (size,), place[1])
    return found


def _place_among_experts(node: fx.Node) -> tuple[tuple[fx.Node, ...], int] | None:
    """The operators that read a parameter of one expert, and which expert's it is."""
    readers: list[tuple[fx.Node, int]] = []
    for reader, value in _readers(node):
        if family(reader.target) not in SEPARATE_EXPERTS or _listed(reader).count(value) != 1:
            return None
        readers.append((reader, _listed(reader).index(value)))
    experts = {expert for _, expert in readers}
    if len(experts) != 1 or not shape_of(node):
        return None
    return tuple(reader for reader, _ in readers), experts.pop()


def _readers(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """What reads a value, or the same numbers in another type; and what it reads."""
    for user in node.users:
        if family(user.target) in SAME_VALUES:
            yield from _readers(user)
        else:
            yield user, node


def _listed(reader: fx.Node) -> Sequence[Any]:
    """The parameters that an operator has one of for every expert."""
    listed = reader.args[1]
    assert isinstance(listed, (list, tuple))
    return listed


def _expert_dims(node: fx.Node) -> set[int]:
    found = set(_dims_of(node, tuple(range(len(shape_of(node))))))
    return set() if None in found else {dim for dim in found if dim is not None}


def _dims_of(node: fx.Node, dims: tuple[int, ...]) -> Iterator[int | None]:
    """The expert dim in every operator that reads a parameter; None where there is none.

    Args:
        node: the parameter, or a view of it.
        dims: for every dim of `node`, which dim of the parameter it is.
    """
    for user in node.users:
        name = family(user.target)
        if name in SAME_VALUES:
            yield from _dims_of(user, dims)
        elif name in TRANSPOSES and len(dims) > 1:
            yield from _dims_of(user, permuted_dims(user, dims))
        elif name in GROUPED_GEMMS and user.args[1] is node:
            yield dims[0]
        elif name in MATMULS and len(dims) == 3:
            yield dims[0] if all(len(shape_of(n)) == 3 for n in user.all_input_nodes) else None
        elif name == "einsum":
            yield _batch_letter(user, node, dims)
        elif name == "index":
            yield _picked(user, node, dims)
        else:
            yield None


def _batch_letter(user: fx.Node, node: fx.Node, dims: tuple[int, ...]) -> int | None:
    """The dim of an einsum's weight that both factors and the result have."""
    found = contraction(user)
    if found is None or len(found.factors) != 2 or len(dims) != 3:
        return None
    own = next(labels for n, labels in found.factors if n is node)
    every = [found.result, *(labels for _, labels in found.factors)]
    shared = [label for label in own if label and all(label in labels for labels in every)]
    return dims[own.index(shared[0])] if len(shared) == 1 else None


def _picked(user: fx.Node, node: fx.Node, dims: tuple[int, ...]) -> int | None:
    """The first dim of values that are picked for the rows of a grouped product."""
    indices = user.args[1]
    assert isinstance(indices, (list, tuple))
    if user.args[0] is not node or len(indices) != 1 or not isinstance(indices[0], fx.Node):
        return None
    offsets = offsets_of(indices[0])
    return dims[0] if offsets is not None and shape_of(offsets) == shape_of(node)[:1] else None
