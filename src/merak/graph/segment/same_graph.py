"""Comparison of two graphs of one model: whether they run the same operators."""

from __future__ import annotations

import torch
from torch import fx

from merak.graph.ir.ir import ModelGraph, Segment


def is_same_graph(one: ModelGraph, other: ModelGraph) -> bool:
    """Whether two graphs compute the same, whatever their values are called."""
    pairs = zip((one.prologue, *one.segments), (other.prologue, *other.segments), strict=False)
    return (
        len(one.segments) == len(other.segments)
        and list(one.outputs) == list(other.outputs)
        and one.parameters == other.parameters
        and one.constants.keys() == other.constants.keys()
        and all(torch.equal(one.constants[n], other.constants[n]) for n in one.constants)
        and all(_same_segment(a, b) for a, b in pairs)
    )


def _same_segment(one: Segment, other: Segment) -> bool:
    fixed = (one.parameters, one.buffers, one.columns)
    if fixed != (other.parameters, other.buffers, other.columns):
        return False
    return _written_out(one.graph) == _written_out(other.graph)


def _written_out(graph: fx.Graph) -> list[tuple[object, ...]]:
    """Operators of a graph and what they yield, with values by their index."""
    places = {node: f"%{i}" for i, node in enumerate(graph.nodes)}

    def line(node: fx.Node) -> tuple[object, ...]:
        target = node.target if node.op == "call_function" else node.op
        args = repr(fx.map_arg((node.args, dict(node.kwargs)), lambda n: _Place(places[n])))
        return target, args, node.meta.get("tensor"), node.meta.get("source")

    return [line(node) for node in graph.nodes]


class _Place(str):
    """Index of a value, in the text of an operator's arguments."""
