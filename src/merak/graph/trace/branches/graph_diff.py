"""Differences between traces of one model with other answers to its conditions.

Two traces are compared from their outputs backwards. Operators at the same place in the model's
code are equal if their operands are; where the place differs, the value that the full trace reads
is skipped in the other, which reads a value from before it instead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from merak.core.errors import TraceError
from merak.graph.ir.ir import returned_nodes
from merak.graph.ir.mutation import is_mutating
from merak.graph.trace.normalize import is_random
from merak.graph.trace.traced import Trace


@dataclass(frozen=True, slots=True)
class SkippedNode:
    """A node of the full trace that a condition skips.

    Args:
        condition: its number.
        made: a result of skipped operators that others read.
        instead: the value that they read when it is skipped.
    """

    condition: int
    made: fx.Node
    instead: fx.Node


@dataclass(frozen=True, slots=True)
class GraphDiff:
    """Nodes that conditions skip, and the values read in place of them.

    Args:
        skipped: in execution order.
        inside: operators that run only if a condition does not skip them → that condition.
    """

    skipped: tuple[SkippedNode, ...]
    inside: dict[fx.Node, int]


def conditions_of(trace: Trace) -> tuple[fx.Node, ...]:
    """The condition nodes of a trace, in the order in which the model evaluates them."""
    returned = returned_nodes(trace.graph)
    return returned[len(returned) - trace.num_conditions :]


def regions_of(trace: Trace) -> dict[fx.Node, int]:
    """Per node, the number of conditions evaluated before it, its own not included."""
    conditions = set(conditions_of(trace))
    regions: dict[fx.Node, int] = {}
    so_far = 0
    for node in trace.graph.nodes:
        regions[node] = so_far
        so_far += node in conditions
    return regions


def diff_graphs(run: Trace, others: Sequence[tuple[Trace, frozenset[int]]]) -> GraphDiff:
    """Compare traces with the one in which everything runs.

    Args:
        run: the trace with everything.
        others: traces, and the conditions that skip something in each.

    Raises:
        TraceError: they differ in more than skipped operators.
    """
    aligner = _Aligner(run, [_Other(trace, skipped, _keys(trace)) for trace, skipped in others])
    return aligner.run()


Key = tuple[Any, ...]


@dataclass(slots=True)
class _Other:
    """A trace that skips something, and its nodes by those of the full trace.

    Args:
        trace: the trace.
        skipped: the conditions that skip something in it.
        keys: where each of its nodes is in the code.
        same: node of the full trace → equal node here.
        instead: skipped node of the full trace → node that is read here in place of it.
    """

    trace: Trace
    skipped: frozenset[int]
    keys: dict[fx.Node, Key]
    same: dict[fx.Node, fx.Node] = field(default_factory=dict)
    instead: dict[fx.Node, fx.Node] = field(default_factory=dict)


def _keys(trace: Trace) -> dict[fx.Node, Key]:
    regions = regions_of(trace)
    return {node: _key(node, regions[node]) for node in trace.graph.nodes}


def _key(node: fx.Node, region: int) -> Key:
    meta = node.meta
    if node.op == "placeholder":
        return ("placeholder", meta["kind"], meta["name"])
    constants = repr(fx.map_arg((node.args, dict(node.kwargs)), lambda n: _Operand()))
    where = (meta.get("source"), meta.get("module"))
    return (str(node.target), region, *where, str(meta.get("tensor")), constants)


class _Operand(str):
    """Placeholder for an operand in the text of an operator's arguments."""

    def __repr__(self) -> str:
        return "%"  # differs from every quoted string


class _Aligner:
    def __init__(self, run: Trace, others: list[_Other]) -> None:
        self.run_trace = run
        self.others = others
        self.keys = _keys(run)
        self.places = {node: i for i, node in enumerate(run.graph.nodes)}
        self.regions = regions_of(run)
        self.by_key: defaultdict[Key, list[fx.Node]] = defaultdict(list)
        for node, key in self.keys.items():
            self.by_key[key].append(node)

    def run(self) -> GraphDiff:
        """Pair the nodes of all traces, from the last that differs to the first."""
        for other in self.others:
            self._pair_returned(other)
            self._pair_writes(other)
        skipped: list[SkippedNode] = []
        handled: set[fx.Node] = set()
        while left := {n for other in self.others for n in other.instead} - handled:
            # Readers run after a value: all of its readers have been paired by then.
            made = max(left, key=self.places.__getitem__)
            skipped.append(self._skipped_node(made))
            handled.add(made)
        for other in self.others:
            self._check(other)
        skipped.sort(key=lambda d: self.places[d.made])
        return GraphDiff(tuple(skipped), self._inside())

    def _pair_returned(self, other: _Other) -> None:
        mine, its = returned_nodes(self.run_trace.graph), returned_nodes(other.trace.graph)
        for one, two in zip(mine, its, strict=True):
            self._pair(other, one, two)

    def _pair_writes(self, other: _Other) -> None:
        """Pair mutating operators, which nothing need read, by their place in the code."""
        left = [n for n in self.run_trace.graph.nodes if is_mutating(n)]
        for node in other.trace.graph.nodes:
            if not is_mutating(node):
                continue
            while left and self.keys[left[0]] != other.keys[node]:
                left.pop(0)
            if not left:
                raise self._refusal(node, "writes into a tensor only if something is left out")
            self._pair(other, left.pop(0), node)

    def _pair(self, other: _Other, mine: fx.Node, its: fx.Node) -> None:
        """Pair two nodes, and their operands."""
        todo = [(mine, its)]
        while todo:
            one, two = todo.pop()
            known = other.same.get(one) or other.instead.get(one)
            if known is not None:
                if known is not two:
                    raise self._refusal(one, "is read in two ways where something is left out")
                continue
            if self.keys[one] != other.keys[two]:
                other.instead[one] = two
                continue
            other.same[one] = two
            todo += zip(_operands(one), _operands(two), strict=True)

    def _skipped_node(self, made: fx.Node) -> SkippedNode:
        """Find the condition that skips a value, and the value read in place of it."""
        without = [other for other in self.others if made in other.instead]
        condition = self._condition(made, without)
        found = [(self._twin(other, other.instead[made], made), other) for other in without]
        candidates = [node for node, _ in found if node is not None]
        if len(candidates) < len(found):
            raise self._refusal(made, "is replaced by something that is computed in its place")
        instead = max(candidates, key=self.places.__getitem__)
        for other in without:
            self._pair(other, instead, other.instead[made])
        if instead.meta["tensor"] is None or not _same_meta(made, instead):
            raise self._refusal(made, "is replaced by a tensor of another shape or type")
        return SkippedNode(condition, made, instead)

    def _condition(self, made: fx.Node, without: list[_Other]) -> int:
        with_it = [other for other in self.others if made in other.same]
        region = self.regions[made] - 1
        fitting = [
            number
            for number in sorted(
                range(self.run_trace.num_conditions), key=lambda n: (n != region, n)
            )
            if all(number in other.skipped for other in without)
            and not any(number in other.skipped for other in with_it)
        ]
        if not fitting:
            raise self._refusal(made, "depends on several conditions at once")
        return fitting[0]

    def _twin(self, other: _Other, node: fx.Node, made: fx.Node) -> fx.Node | None:
        """The node of the full trace at the same place in the code, before a skipped one.

        One line in a loop computes several: those behind the skipped node have their twins already.
        """
        paired = [mine for mine, its in other.same.items() if its is node]
        known, last = other.same, self.places[made]
        found = paired or [
            n for n in self.by_key[other.keys[node]] if n not in known and self.places[n] < last
        ]
        return found[-1] if found else None

    def _check(self, other: _Other) -> None:
        """Check that every operator with an effect has exactly one counterpart."""
        twins = list(other.same.values())
        if len(set(twins)) < len(twins):
            raise self._refusal(conditions_of(other.trace)[0], "merges operators")
        for node in other.trace.graph.nodes:
            if (is_mutating(node) or is_random(node)) and node not in set(twins):
                raise self._refusal(node, "runs only if something is left out")

    def _inside(self) -> dict[fx.Node, int]:
        """Operators that run only if a condition does not skip them."""
        inside: dict[fx.Node, int] = {}
        for node in self.run_trace.graph.nodes:
            if node.op != "call_function":
                continue
            without = frozenset(i for i, o in enumerate(self.others) if node not in o.same)
            for number in range(self.run_trace.num_conditions):
                leaving = frozenset(
                    i for i, other in enumerate(self.others) if number in other.skipped
                )
                if without and leaving <= without:
                    inside[node] = number
                    break
        return inside

    def _refusal(self, node: fx.Node, what: str) -> TraceError:
        first = conditions_of(self.run_trace)[0].meta["source"]
        return TraceError(
            f"the model cannot be traced at {first}, where a random number decides what runs "
            f"next: what {node.meta.get('source') or node.name} computes {what}; let the condition "
            "do nothing but skip a layer, whose input then passes, or switch the feature off "
            "in the model's config."
        )


def _operands(node: fx.Node) -> Iterator[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), lambda n: found.append(n))
    return iter(found)


def _same_meta(one: fx.Node, two: fx.Node) -> bool:
    a, b = one.meta["tensor"], two.meta["tensor"]
    return bool((a.shape, a.dtype) == (b.shape, b.dtype))
