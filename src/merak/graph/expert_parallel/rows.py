"""Operators of a segment's graph that run on experts' rows, and what enters and leaves them.

Rows lie in groups, sorted by expert, each group with a weight of its own; or in batches, with a dim
for the experts in front and one for the rows behind it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch import fx

from merak.core.errors import ShardError
from merak.graph.ir.contractions import Labels, contraction
from merak.graph.ir.mutation import has_mutable_schema
from merak.graph.ir.operators import (
    GROUPED_GEMMS,
    MATMULS,
    SEPARATE_EXPERTS,
    SEPARATE_GEMMS,
    family,
    weights_only,
)
from merak.graph.tensor_parallel.placement import shape_of, where
from merak.graph.tensor_parallel.rules.experts import grouped_operands, is_rowwise, offsets_of


@dataclass(frozen=True, slots=True)
class ExpertRegion:
    """Operators between the first and the last product with the experts of a layer.

    Args:
        offsets: (experts,), where every expert's rows end among the rank's own; None where rows
            lie in batches.
        rows: sizes in front of every value that enters: (rows,), or (experts, rows of each).
        products: with weights of experts.
        lookups: values that are picked by the expert of each row, such as biases.
        inside: all operators of it, in their order.
    """

    offsets: fx.Node | None
    rows: tuple[int, ...]
    products: tuple[fx.Node, ...]
    lookups: tuple[fx.Node, ...]
    inside: tuple[fx.Node, ...]

    def entering(self, node: fx.Node) -> Iterator[fx.Node]:
        """The operands of an operator inside that have rows and are not computed inside."""
        if node in self.lookups:
            return
        operands = (rows_of(node),) if node in self.products else node.all_input_nodes
        for operand in operands:
            if operand not in self.inside and has_rows(operand, node, self.rows):
                yield operand

    def of_experts(self, node: fx.Node) -> Iterator[fx.Node]:
        """The operands of an operator inside that have a value for each expert of a batch."""
        if self.offsets is None and node not in self.products:
            for operand in node.all_input_nodes:
                shape = shape_of(operand)
                if operand not in self.inside and shape[:2] == (self.rows[0], 1):
                    yield operand

    def leaving(self) -> Iterator[fx.Node]:
        """The operators inside whose results are read outside."""
        for node in self.inside:
            if any(user not in self.inside for user in node.users):
                yield node


def expert_regions(
    graph: fx.Graph, weights: Collection[fx.Node], *, batches: bool = True
) -> list[ExpertRegion]:
    """The regions of a segment's graph.

    Args:
        graph: the segment's graph.
        weights: placeholders of the experts' weights, and what stacks are computed by.
        batches: whether to find those whose rows lie in batches, too.

    Raises:
        ShardError: a product with experts whose rows are not in front.
    """
    groups: dict[fx.Node, list[fx.Node]] = {}
    laid_out: dict[tuple[int, ...], list[fx.Node]] = {}
    for node in graph.nodes:
        is_read = any(_is_of(own, weights) for own in node.all_input_nodes)
        if node.op != "call_function" or node in weights or not is_read:
            continue
        if family(node.target) in GROUPED_GEMMS | SEPARATE_EXPERTS:
            groups.setdefault(grouped_operands(node)[2], []).append(node)
        elif family(node.target) == "index":
            offsets = offsets_of(node.args[1][0])  # as `experts_of` has found it to be
            assert offsets is not None
            groups.setdefault(offsets, []).append(node)
        elif batches and family(node.target) in MATMULS | {"einsum"}:
            laid_out.setdefault(_batch_of(node, weights), []).append(node)
    regions = [_region(graph, offsets, anchors) for offsets, anchors in groups.items()]
    return regions + [_region(graph, None, anchors) for anchors in laid_out.values()]


def rows_of(product: fx.Node) -> fx.Node:
    """The operand of a product with experts that has rows, beside the weights."""
    found = product.args[0]
    if family(product.target) == "einsum":
        terms, result = _terms(product)
        place = [term[:2] for term in terms].index(result[:2])
        found = product.all_input_nodes[place]
    assert isinstance(found, fx.Node)
    return found


def has_rows(node: fx.Node, like: fx.Node, rows: tuple[int, ...]) -> bool:
    """Whether a value has a row for each row of an operator's result."""
    shape = shape_of(node)
    return shape[: len(rows)] == rows and len(shape) == len(shape_of(like))


def _is_of(node: fx.Node, weights: Collection[fx.Node]) -> bool:
    """Whether a value is one of some weights, or shows one in another way."""
    while node not in weights and node.op == "call_function" and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node in weights


def _batch_of(product: fx.Node, weights: Collection[fx.Node]) -> tuple[int, ...]:
    """Sizes in front of a product's result: experts, and the rows of each."""
    shape = shape_of(product)
    terms, result = _terms(product)
    operands = list(zip(product.all_input_nodes, terms, strict=True))
    of_rows = any(term[:2] == result[:2] for node, term in operands if not _is_of(node, weights))
    of_experts = any(result[0] in term for node, term in operands if _is_of(node, weights))
    if len(shape) < 3 or not of_rows or not of_experts:
        raise ShardError(
            f"ep shares out experts over replicas where the dim of experts is the first, and rows "
            f"the second, which they are not for {product.name} ({where(product)}); use ep equal "
            "to tp, or ep=1."
        )
    return shape[:2]


def _terms(product: fx.Node) -> tuple[list[Labels], Labels]:
    """The labels of a product's operands and of its result."""
    found = contraction(product)
    assert found is not None, f"{product} has an operand's letter twice"
    return [tuple(labels) for _, labels in found.factors], found.result


def _region(graph: fx.Graph, offsets: fx.Node | None, anchors: list[fx.Node]) -> ExpertRegion:
    of_products = GROUPED_GEMMS | SEPARATE_GEMMS | MATMULS | {"einsum"}
    products = [n for n in anchors if family(n.target) in of_products]
    rows = shape_of(products[0])[: 1 if offsets is not None else 2]
    fixed = weights_only(graph, constants=True)
    reached: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node in anchors or (
            node.op == "call_function" and _is_rowwise(node, reached, fixed, rows)
        ):
            reached[node] = None
    kept: set[fx.Node] = set(products)
    for node in reversed(reached):
        joins = sum(n in reached for n in node.all_input_nodes) > 1
        if joins or any(user in kept for user in node.users):
            kept.add(node)
    inside = tuple(n for n in reached if n in kept)
    lookups = tuple(n for n in inside if n in anchors and n not in products)
    return ExpertRegion(offsets, rows, tuple(products), lookups, inside)


def _is_rowwise(
    node: fx.Node, reached: Collection[fx.Node], fixed: Collection[fx.Node], rows: tuple[int, ...]
) -> bool:
    """Whether an operator gives each row of its result from the same row of its operands."""
    operands = node.all_input_nodes
    own = [n for n in operands if n in reached]
    if not own or any(isinstance(n.meta["tensor"], tuple) for n in own):
        return bool(own) and family(node.target) == "getitem"
    for operand in operands:
        if operand not in reached and operand not in fixed and not has_rows(operand, node, rows):
            return False
    if has_mutable_schema(node) and node.args[0] not in reached:
        return False
    return is_rowwise(node, own, len(rows))
