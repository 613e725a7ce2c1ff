"""Linear layers whose products are of float8: a rewriting of a rank's segments.

Products whose weight is a matrix that trains, and whose sizes are what the kernels of GPUs want,
become `ops.float8.float8_linears`, one for those that read the same. The last segment, which has
the head, keeps its precision: logits decide the loss.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from merak.graph.expert_parallel.apply import LocalRewrite
from merak.graph.further_rewrite import FurtherRewrite
from merak.graph.ir.ir import Kind, ModelGraph, Segment
from merak.graph.ir.mutation import eliminate_dead_code
from merak.graph.ir.operators import CONVERSIONS, GEMM_OPERANDS, MATMULS, family
from merak.graph.segment.cut import copy_graph
from merak.graph.tensor_parallel.placement import shape_of
from merak.ops.float8 import MULTIPLE, float8_linears

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, eq=False)
class Float8(FurtherRewrite):
    """Rewriting of a model's segments into those of a rank, with products of float8.

    Args:
        axes: of the mesh, along which ranks have other shards or rows of a product's operands.
        last: number of the last segment, which is left as it is.
    """

    axes: tuple[str, ...]
    last: int = -1

    def changed(self, segment: Segment) -> fx.Graph | None:
        """Graph with such products."""
        return None if segment.index == self.last else in_float8(segment.graph, self.axes)

    def fit(self, model: ModelGraph) -> tuple[ModelGraph, Float8]:
        """Plan as of `SegmentRewrite`."""
        graph, fitted = FurtherRewrite.fit(self, model)
        return graph, replace(fitted, last=model.segments[-1].index)

    def like(self, segment: Segment) -> Hashable:
        """Key as of `SegmentRewrite`."""
        return segment.index == self.last, FurtherRewrite.like(self, segment)


def with_float8(
    rewrite: LocalRewrite | None, fp8: bool, tp: int, cp: int
) -> LocalRewrite | Float8 | None:
    """What makes a model's segments those of one rank, in training.

    Args:
        rewrite: the same in the model's own precision.
        fp8: the option.
        tp: tensor parallel degree.
        cp: context parallel degree.
    """
    axes = tuple(axis for axis, degree in (("tp", tp), ("cp", cp)) if degree > 1)
    return Float8(rewrite, axes) if fp8 else rewrite


@dataclass(frozen=True, slots=True)
class _Layer:
    """A product of rows and a parameter.

    Args:
        node: of the product.
        x: what it reads.
        weight: the parameter, or a view of it.
        bias: what is added, or None.
        is_turned: whether the weight is (inputs, outputs).
    """

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    is_turned: bool

    @property
    def name(self) -> str:
        """Name of the parameter."""
        return str(_parameter_of(self.weight).meta["name"])

    @property
    def obstacle(self) -> str:
        """Why the product is not of float8; empty where it is."""
        if not self.weight.meta["tensor"].requires_grad:
            return "frozen"
        if _chooses(self.node):
            return "a router, whose results choose experts"
        *rows, inputs = shape_of(self.x)
        sizes = (torch.Size(rows).numel(), inputs, shape_of(self.node)[-1])
        if any(size % MULTIPLE for size in sizes):
            return f"{' × '.join(map(str, sizes))} are not all multiples of {MULTIPLE}"
        return ""


def in_float8(graph: fx.Graph, axes: tuple[str, ...]) -> fx.Graph | None:
    """Graph of a segment whose linear layers have products of float8.

    Args:
        graph: as a rank runs it; left as it is.
        axes: as of `Float8`.

    Returns:
        A copy; None where there is no such layer.
    """
    if all(layer.obstacle for layer in _layers(graph)):
        return None
    new, _ = copy_graph(graph)
    for layers in _groups(new):
        _replace(layers, axes)
    eliminate_dead_code(new, new.find_nodes(op="placeholder"))
    new.lint()
    return new


def float8_layers(segments: Iterable[Segment]) -> Iterator[tuple[str, str]]:
    """Name of the weight of each linear layer, and why its product is not of float8, or "".

    Args:
        segments: as a rank runs them.
    """
    for segment in segments:
        for node in segment.graph.nodes:
            if node.target is float8_linears:
                for weight in node.args[1]:
                    yield str(_parameter_of(weight).meta["name"]), ""
        for layer in _layers(segment.graph):
            yield layer.name, layer.obstacle or "part of the head"


def _layers(graph: fx.Graph) -> Iterator[_Layer]:
    """Products of a graph whose second operand is a matrix that is a parameter."""
    for node in graph.nodes:
        name = family(node.target) if node.op == "call_function" else ""
        if name not in ("linear", "addmm", *MATMULS):
            continue
        operands = GEMM_OPERANDS[name]
        bias = None
        if operands.bias is not None and operands.bias < len(node.args):
            bias = node.args[operands.bias]
        given = node.args[operands.x], node.args[operands.weight]
        x, weight = (_unconverted(own) for own in given if isinstance(own, fx.Node))
        if node.kwargs:
            continue
        parameter = _parameter_of(weight)
        if len(shape_of(weight)) == 2 and parameter.meta.get("kind") is Kind.PARAMETER:
            yield _Layer(node, x, weight, bias, is_turned=name != "linear")


def _unconverted(operand: fx.Node) -> fx.Node:
    """An operand as it is before autocast gives it a type, which a cast to eight bits takes off."""
    while family(operand.target) in CONVERSIONS and len(operand.all_input_nodes) == 1:
        operand = operand.all_input_nodes[0]
    return operand


def _chooses(product: fx.Node) -> bool:
    """Whether the largest results of a product are chosen, before another product reads them."""
    waiting, seen = list(product.users), set[fx.Node]()
    while waiting:
        node = waiting.pop()
        if node in seen or node.op != "call_function" or family(node.target) in GEMM_OPERANDS:
            continue
        if family(node.target) == "topk":
            return True
        seen.add(node)
        waiting.extend(node.users)
    return False


def _parameter_of(weight: Any) -> fx.Node:
    """What a weight is a view of."""
    node: fx.Node = weight
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node


def _groups(graph: fx.Graph) -> list[list[_Layer]]:
    """Layers that read the same and give the same type, whose product can be of float8.

    Those of a group are where the first of them runs, by which what they read must be there.
    """
    place = {node: number for number, node in enumerate(graph.nodes)}
    groups = dict[tuple[Any, ...], list[_Layer]]()
    for layer in _layers(graph):
        if layer.obstacle:
            continue
        key = layer.x, layer.node.meta["tensor"].dtype
        first = groups.get(key, [layer])[0].node
        read = (own for own in (layer.weight, layer.bias) if own is not None)
        is_late = any(place[own] > place[first] for own in read)
        groups.setdefault((*key, layer.node) if is_late else key, []).append(layer)
    return list(groups.values())


def _replace(layers: Sequence[_Layer], axes: tuple[str, ...]) -> None:
    """Put products of float8 in the place of others that read the same."""
    first = layers[0].node
    graph, dtype = first.graph, first.meta["tensor"].dtype
    with graph.inserting_before(first):
        weights = tuple(_by_outputs(layer) for layer in layers)
        biases = tuple(layer.bias for layer in layers)
        both = graph.call_function(float8_linears, (layers[0].x, weights, biases, dtype, axes))
        both.meta = {**first.meta, "tensor": tuple(own.node.meta["tensor"] for own in layers)}
        made = [graph.call_function(operator.getitem, (both, n)) for n in range(len(layers))]
    for own, layer in zip(made, layers, strict=True):
        own.meta = dict(layer.node.meta)
        layer.node.replace_all_uses_with(own)
        graph.erase_node(layer.node)


def _by_outputs(layer: _Layer) -> fx.Node:
    """The weight of a layer as (outputs, inputs)."""
    if not layer.is_turned:
        return layer.weight
    turned = layer.node.graph.call_function(aten.t.default, (layer.weight,))
    shape = tuple(reversed(shape_of(layer.weight)))
    turned.meta = {**layer.weight.meta, "tensor": replace(layer.weight.meta["tensor"], shape=shape)}
    return turned
