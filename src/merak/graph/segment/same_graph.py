"""Comparison of two graphs of one model: whether they run the same operators."""

from __future__ import annotations

from collections.abc import Sequence

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
        and all(
            _same_segment(a, b) and _same_buffers(one, a.buffers, other, b.buffers)
            for a, b in pairs
        )
    )


def _same_segment(one: Segment, other: Segment) -> bool:
    if (one.parameters, one.columns) != (other.parameters, other.columns):
        return False
    return _written_out(one.graph) == _written_out(other.graph)


def _same_buffers(
    one: ModelGraph, ours: Sequence[str], other: ModelGraph, theirs: Sequence[str]
) -> bool:
    """Whether two segments read the same buffers, and constants of equal values."""
    if len(ours) != len(theirs):
        return False
    for name, its_name in zip(ours, theirs, strict=True):
        constants = one.constants.get(name), other.constants.get(its_name)
        if (constants[0] is None) != (constants[1] is None):
            return False
        if constants[0] is None or constants[1] is None:
            if name != its_name:
                return False
        elif not torch.equal(constants[0], constants[1]):  # whatever a trace has called them
            return False
    return True


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
