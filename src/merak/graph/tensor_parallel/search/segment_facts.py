"""Facts about a segment that a search over its weights' shards asks for, whatever is split."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import fx

from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import Kind, Segment, returned_nodes
from merak.graph.ir.operators import is_weight_gemm
from merak.graph.tensor_parallel.placement import shape_of


def ancestors(graph: fx.Graph) -> dict[fx.Node, frozenset[str]]:
    """Parameters that every value depends on."""
    found: dict[fx.Node, frozenset[str]] = {}
    for node in graph.nodes:
        own = {node.meta["name"]} if node.meta.get("kind") is Kind.PARAMETER else ()
        found[node] = frozenset(own).union(*(found[n] for n in node.all_input_nodes))
    return found


def gradient_sources(graph: fx.Graph, place: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """Values that every value's gradient flows on to, each as a bit at its index."""
    found: dict[fx.Node, int] = {}
    for node in graph.nodes:
        found[node] = 0
        for source in node.all_input_nodes if _passes_gradients(node) else ():
            found[node] |= found[source] | 1 << place[source]
    return found


def _passes_gradients(node: fx.Node) -> bool:
    """Whether a gradient flows through a value, or through one of a tuple."""
    found = node.meta.get("tensor")
    each = found if isinstance(found, (tuple, list)) else (found,)
    return any(isinstance(meta, TensorMeta) and meta.requires_grad for meta in each)


def depth_of(graph: fx.Graph) -> int:
    """Largest number of weight GEMMs one after another."""
    depth: dict[fx.Node, int] = {}
    for node in graph.nodes:
        before = max((depth[n] for n in node.all_input_nodes), default=0)
        depth[node] = before + (node.op == "call_function" and is_weight_gemm(node))
    return max(depth.values(), default=0)


def activation_tokens(segment: Segment) -> int:
    """Number of tokens of the largest value that enters or leaves the segment."""
    return math.prod(largest_value(segment)[:-1])


def num_streams(segment: Segment) -> int:
    """Number of activations that go through the segment side by side, as of text and an image."""
    values = [n for n in segment.graph.find_nodes(op="placeholder") if n.meta["kind"] is Kind.VALUE]
    passed = [sum(map(_passes_gradients, own)) for own in (values, returned_nodes(segment.graph))]
    return max(1, min(passed))


def largest_value(segment: Segment) -> tuple[int, ...]:
    """Shape of the largest value that enters or leaves the segment."""
    values = [n for n in segment.graph.find_nodes(op="placeholder") if n.meta["kind"] is Kind.VALUE]
    shapes = [shape_of(n) for n in (*values, *returned_nodes(segment.graph))]
    return max(((1,), *shapes), key=math.prod)
