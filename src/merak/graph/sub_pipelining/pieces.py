"""Pieces of a segment between its all-reduces, so that other work can overlap these.

A tensor parallel block all-reduces its output where it ends (`reduce_from`), and its input's
gradient where it begins (`copy_to`). Cut there, a segment is a list of pieces without
communication; the all-reduces stand between them as data, for the engine that runs the pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torch import fx

from merak.graph.ir.ir import Kind, Segment, returned_nodes
from merak.graph.ir.mutation import has_mutable_schema
from merak.graph.segment.cut import sub_graph
from merak.ops.collectives import copy_to, reduce_from


@dataclass(frozen=True, slots=True)
class PieceAllReduce:
    """All-reduce of a value, or of its gradient, between two pieces.

    Args:
        source: the value before.
        result: the value after.
        in_forward: the value is all-reduced over the ranks; else it passes as it is, and its
            gradient
            is summed on the way back.
    """

    source: str
    result: str
    in_forward: bool


@dataclass(frozen=True, slots=True)
class Piece:
    """Piece of a segment without communication, and the all-reduces that follow it.

    Args:
        segment: what it computes; its inputs and outputs are names of values that pieces of this
            segment give one another, or the segment's own.
        all_reduces: what follows it, before any piece that reads the results.
    """

    segment: Segment
    all_reduces: tuple[PieceAllReduce, ...]


def cut_at_all_reduces(segment: Segment) -> tuple[Piece, ...]:
    """Pieces of a segment, cut at the all-reduces of its activations.

    Args:
        segment: a rank's shard of it; left as it is. One that writes in place is not cut.

    Returns:
        Pieces in an order in which they can run.
    """
    cutter = _Cutter(segment)
    return tuple(cutter.piece(level) for level in range(cutter.num_levels))


def returned_names(segment: Segment) -> tuple[str, ...]:
    """Names in the pieces of the values that a segment returns, in the order of its outputs."""
    cutter = _Cutter(segment)
    return tuple(cutter.name(node) for node in cutter.returned)


def _levels(operators: Sequence[fx.Node], cuts: Collection[fx.Node]) -> dict[fx.Node, int]:
    """Largest number of all-reduces before each operator."""
    levels: dict[fx.Node, int] = {}
    for node in operators:
        before = [levels[n] + (n in cuts) for n in node.all_input_nodes if n in levels]
        levels[node] = max(before, default=0)
    return levels


def _is_cut(node: fx.Node) -> bool:
    """Whether a node all-reduces an activation or its gradient; those of weights stay inside."""
    if node.target not in (reduce_from, copy_to):
        return False
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source.op != "placeholder" or source.meta["kind"] is Kind.VALUE


class _Cutter:
    """Builder of pieces: copies the operators of each level into a graph of their own."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        operators = [node for node in segment.graph.nodes if node.op == "call_function"]
        # What is written in place must stay in one piece, with the sums inside.
        in_place = any(has_mutable_schema(node) for node in operators)
        self.cuts = {} if in_place else {node: None for node in operators if _is_cut(node)}
        self.levels = _levels(operators, self.cuts)
        self.num_levels = max((n + (o in self.cuts) for o, n in self.levels.items()), default=0) + 1
        self.returned = returned_nodes(segment.graph)
        self.names: dict[fx.Node, str] = {}
        for name, node in zip(segment.outputs, self.returned, strict=True):
            self.names.setdefault(node, name)

    def piece(self, level: int) -> Piece:
        """Piece of one level: its operators, and the all-reduces after them."""
        own = [n for n, found in self.levels.items() if found == level and n not in self.cuts]
        outputs = [n for n in own if self._leaves(n, level)]
        return Piece(
            sub_segment(self.segment, own, outputs, self.name),
            tuple(
                PieceAllReduce(self.name(_source(n)), self.name(n), n.target is reduce_from)
                for n in self.cuts
                if self.levels[n] == level
            ),
        )

    def _leaves(self, node: fx.Node, level: int) -> bool:
        if node in self.returned:
            return True
        return any(n in self.cuts or self.levels.get(n, level) != level for n in node.users)

    def name(self, node: fx.Node) -> str:
        """Name of a value in the pieces."""
        if node.op == "placeholder":
            return str(node.meta["name"])
        # A value of this segment alone is named apart from those between segments.
        return self.names.get(node, f"{self.segment.index}/{node.name}")


def sub_segment(
    segment: Segment,
    own: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    name: Callable[[fx.Node], str],
) -> Segment:
    """Segment of some of a segment's operators.

    Args:
        segment: the whole.
        own: the operators, in their order.
        outputs: those whose results others read.
        name: what a value is called outside.
    """
    graph = sub_graph(own, outputs, lambda node: Kind.VALUE, name)
    return Segment.of(segment.index, segment.name, graph, map(name, outputs))


def _source(node: fx.Node) -> fx.Node:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source
