"""Segments cut at their all-reduces, so that something else can run while one is under way.

A tensor parallel block sums over the ranks where it ends (`reduce_from`), and its gradient where it
begins (`copy_to`). Cut there, a segment is a list of pieces without communication; what is summed
stands between them as data, for whoever runs the pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torch import fx

from merak.graph.ir.ir import Kind, Segment
from merak.graph.ir.mutation import has_mutable_schema
from merak.ops.collectives import copy_to, reduce_from


@dataclass(frozen=True, slots=True)
class PieceAllReduce:
    """A value on its way from one piece to others.

    Args:
        source: the value before.
        result: the value after.
        in_forward: the value is summed over the ranks; else it passes as it is, and its gradient
            is summed on the way back.
    """

    source: str
    result: str
    in_forward: bool


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a segment.

    Args:
        segment: what it computes; its inputs and outputs are names of values that pieces of this
            segment give one another, or the segment's own.
        crossings: what follows it, before any piece that reads the results.
    """

    segment: Segment
    crossings: tuple[PieceAllReduce, ...]


def cut_at_all_reduces(segment: Segment) -> tuple[Piece, ...]:
    """Cut a segment at the all-reduces of its activations.

    Args:
        segment: a rank's share of it; left as it is. One that writes in place is not cut.

    Returns:
        Pieces in an order in which they can run.
    """
    cutter = _Cutter(segment)
    return tuple(cutter.piece(level) for level in range(cutter.num_levels))


def returned_names(segment: Segment) -> tuple[str, ...]:
    """What the pieces of a segment call the values that it returns, in the order of its outputs."""
    cutter = _Cutter(segment)
    return tuple(cutter.name(node) for node in cutter.returned)


def _levels(operators: Sequence[fx.Node], cuts: Collection[fx.Node]) -> dict[fx.Node, int]:
    """How many all-reduces come before each operator at the most."""
    levels: dict[fx.Node, int] = {}
    for node in operators:
        before = [levels[n] + (n in cuts) for n in node.all_input_nodes if n in levels]
        levels[node] = max(before, default=0)
    return levels


def _is_cut(node: fx.Node) -> bool:
    """Whether a node sums an activation or its gradient; weights' sums stay inside a piece."""
    if node.target not in (reduce_from, copy_to):
        return False
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source.op != "placeholder" or source.meta["kind"] is Kind.VALUE


class _Cutter:
    """Copies the operators of each level into a graph of their own."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        operators = [node for node in segment.graph.nodes if node.op == "call_function"]
        # What is written in place must stay in one piece, with the sums inside.
        in_place = any(has_mutable_schema(node) for node in operators)
        self.cuts = {} if in_place else {node: None for node in operators if _is_cut(node)}
        self.levels = _levels(operators, self.cuts)
        self.num_levels = max((n + (o in self.cuts) for o, n in self.levels.items()), default=0) + 1
        (output,) = segment.graph.find_nodes(op="output")
        returned = output.args[0]
        assert isinstance(returned, tuple)
        self.returned: tuple[fx.Node, ...] = returned
        self.names: dict[fx.Node, str] = {}
        for name, node in zip(segment.outputs, returned, strict=True):
            self.names.setdefault(node, name)

    def piece(self, level: int) -> Piece:
        """The operators of one level, and what is summed after them."""
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
        """What the pieces call a value."""
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
    """Some of a segment's operators as a segment of their own.

    Args:
        segment: the whole.
        own: the operators, in their order.
        outputs: those whose results others read.
        name: what a value is called outside.
    """
    inside = set(own)
    read = dict.fromkeys(n for node in own for n in node.all_input_nodes if n not in inside)
    by_kind: dict[Kind, list[fx.Node]] = {kind: [] for kind in Kind}
    for node in read:
        kind = node.meta["kind"] if node.op == "placeholder" else Kind.VALUE
        by_kind[kind].append(node)
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for kind in Kind:
        for node in by_kind[kind]:
            env[node] = graph.placeholder(node.name)
            env[node].meta = {**node.meta, "kind": kind, "name": name(node)}
    for node in own:
        env[node] = graph.node_copy(node, lambda n: env[n])
    graph.output(tuple(env[n] for n in outputs))
    return Segment.of(segment.index, segment.name, graph, map(name, outputs))


def _source(node: fx.Node) -> fx.Node:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source
