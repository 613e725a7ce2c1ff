"""Placements inside an opaque loop, and whether its own code computes on shards what they say.

The loop's operators, written out, are decided one by one by the rules of all operators. They must
need nothing of another rank. Then the same code is written out at the shards' sizes: where it calls
the same operators with the same arguments, on values of the sizes that the placements say, it
computes on shards what tensor parallelism would make of its operators.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from merak.core.errors import ShardError
from merak.core.tensor_meta import requires_grad
from merak.graph.ir.ir import returned_nodes
from merak.graph.ir.mutation import is_mutating, mutated_arguments
from merak.graph.ir.operators import (
    EXPANDS,
    FILLS_NEW,
    FILLS_SHAPE,
    RESHAPES,
    SHAPED_LIKE,
    SPLITS,
    SQUEEZES,
    UNINITIALIZED,
    family,
)
from merak.graph.ir.reachable import reachable
from merak.graph.tensor_parallel.alias_check import refuse_lost_writes
from merak.graph.tensor_parallel.placement import (
    REPLICATE,
    REPLICATE_PARTIAL_GRAD,
    Decision,
    Operator,
    Placement,
    Replicate,
    ResultPlacement,
    Shard,
    local_meta,
    need_of,
    operands_of,
    positive,
    shape_of,
)
from merak.graph.trace.loop_operators import Body

Decide = Callable[[Operator], Decision]

_SIZES = frozenset(("size", "shape", "sizes", "split_size", "split_sizes", "chunks"))
"""Arguments that give nothing but the sizes of results, which are compared themselves."""

_BY_SHAPE = RESHAPES | SHAPED_LIKE | EXPANDS | SPLITS | SQUEEZES
"""Operators of which the results' shapes tell all, so that a rule may write them in other words."""


class Unshardable(Exception):
    """The body cannot run on shards; the message is a clause that says why."""


@dataclass(frozen=True, slots=True)
class BodyPlacements:
    """Placements of a body's values.

    Args:
        placements: by node.
        decisions: by operator.
    """

    placements: Mapping[fx.Node, ResultPlacement]
    decisions: Mapping[fx.Node, Decision]

    def operands(self, graph: fx.Graph) -> tuple[Placement, ...]:
        """Placements of the body's operands."""
        return tuple(self._one(node) for node in graph.find_nodes(op="placeholder"))

    def results(self, graph: fx.Graph) -> tuple[Placement, ...]:
        """Placements of what it returns."""
        return tuple(self._one(node) for node in returned_nodes(graph))

    def _one(self, node: fx.Node) -> Placement:
        placed = self.placements[node]
        assert not isinstance(placed, tuple)
        return placed


def place_body(
    graph: fx.Graph, entering: Sequence[Shard | None], like: Operator, decide: Decide
) -> BodyPlacements:
    """Placements of all values of a body, given those of some operands.

    Operands, and new tensors of one number, get the placement that their readers need.

    Args:
        graph: the body.
        entering: of each operand: how it is sharded; None where that is free.
        like: the opaque call, of which degree and axis are taken.
        decide: the rule of all operators.

    Raises:
        Unshardable: an operator needs values of another rank.
    """
    walk = _Walk(graph, like, decide)
    operands = graph.find_nodes(op="placeholder")
    given = {n: p for n, p in zip(operands, entering, strict=True) if p is not None}
    while True:
        need = walk.run(given)
        if need is None:
            return BodyPlacements(walk.placements, walk.decisions)
        source, placed = walk.source_of(*need, given)
        given[source] = placed


class _Walk:
    """Walks over a body's operators, with more and more of its sources sharded."""

    def __init__(self, graph: fx.Graph, like: Operator, decide: Decide) -> None:
        self.graph = graph
        self.like = like
        self.decide = decide
        self.placements: dict[fx.Node, ResultPlacement] = {}
        self.decisions: dict[fx.Node, Decision] = {}
        self.above = _Ancestors()

    def run(
        self, given: Mapping[fx.Node, Shard], nodes: Collection[fx.Node] | None = None
    ) -> tuple[fx.Node, Shard] | None:
        """Place all values.

        Args:
            given: placements of sources.
            nodes: those to place, as if each had the operands it needs; None for all.

        Returns:
            The first value that had to be sharded and is whole, and how; None where there is none.

        Raises:
            Unshardable: an operator needs something else of another rank.
        """
        self.placements, self.decisions = {}, {}
        by_storage: dict[int | None, set[ResultPlacement]] = {}
        for node in self.graph.nodes:
            if node.op == "output" or (nodes is not None and node not in nodes):
                continue
            if node.op == "placeholder":
                free = REPLICATE_PARTIAL_GRAD if requires_grad(node.meta["tensor"]) else REPLICATE
                self.placements[node] = given.get(node, free)
            elif node in given:
                self.decisions[node] = Decision(given[node])
                self.placements[node] = given[node]
            else:
                like = self.like
                op = Operator(
                    node,
                    self.placements,
                    like.degree,
                    by_storage=by_storage,
                    axis=like.axis,
                    copies=like.copies,
                )
                if (written := _whole_written(op)) is not None:
                    return written
                self.decisions[node] = self._decided(op)
                need = self._need(op) if nodes is None else None
                if need is not None:
                    return need
                self.placements[node] = self.decisions[node].output
            by_storage.setdefault(node.meta.get("storage"), set()).add(self.placements[node])
        if nodes is None:
            try:
                refuse_lost_writes(self.graph, self.placements, self.decisions)
            except ShardError as error:
                raise Unshardable(str(error)) from error
        return None

    def _decided(self, op: Operator) -> Decision:
        try:
            decision = self.decide(op)
        except ShardError as error:
            raise Unshardable(f"at {op.node.name} in it: {error}") from error
        if decision.then or decision.sums or decision.becomes is not None:
            raise Unshardable(f"{op.node.name} in it sums over the ranks")
        return decision

    def _need(self, op: Operator) -> tuple[fx.Node, Shard] | None:
        """The first operand that has to be sharded and is whole."""
        decision = self.decisions[op.node]
        for operand in operands_of(op.node, decision):
            placed, need = self.placements[operand], need_of(operand, decision, self.placements)
            if need is None or placed == need:
                continue
            if isinstance(need, Shard) and isinstance(placed, Replicate):
                return operand, need
            both_whole = isinstance(need, Replicate) and isinstance(placed, Replicate)
            if not both_whole or requires_grad(operand.meta["tensor"]):
                raise Unshardable(f"{op.node.name} in it needs {operand.name} of other ranks")
        return None

    def source_of(
        self, value: fx.Node, need: Shard, given: Mapping[fx.Node, Shard]
    ) -> tuple[fx.Node, Shard]:
        """An operand or new tensor that gives a value the placement it needs.

        Args:
            value: a value of the body.
            need: the placement.
            given: placements of sources so far.

        Raises:
            Unshardable: there is none.
        """
        above = self.above[value]
        for source in reversed(above.sources):
            for placed in _candidates(source, need) if source not in given else ():
                try:
                    self.run({**given, source: placed}, above.all)
                except Unshardable:
                    continue
                if self.placements.get(value) == need:
                    return source, placed
        raise Unshardable(f"{value.name} in it cannot be sharded along dim {need.dim}")


@dataclass(frozen=True, slots=True)
class _Above:
    """What a value is made from.

    Args:
        all: the values, itself included.
        sources: those that may be sharded in any way, in the order of the graph.
    """

    all: frozenset[fx.Node]
    sources: tuple[fx.Node, ...]


class _Ancestors(dict[fx.Node, _Above]):
    """What each value is made from, found when it is asked for."""

    def __missing__(self, node: fx.Node) -> _Above:
        found = reachable([node], lambda n: n.all_input_nodes)
        ordered = tuple(n for n in node.graph.nodes if n in found and _is_source(n))
        self[node] = _Above(frozenset(found), ordered)
        return self[node]


def _is_source(node: fx.Node) -> bool:
    """Whether a value is an operand, or a new tensor of one number, which is so at any size."""
    return node.op == "placeholder" or family(node.target) in FILLS_NEW | FILLS_SHAPE


def _candidates(source: fx.Node, need: Shard) -> Iterator[Shard]:
    """Placements of a source that may give a value the one it needs."""
    for dim, size in enumerate(shape_of(source)):
        if size == sum(need.parts):
            yield Shard(dim, need.parts, need.origin)
    for dim, size in enumerate(shape_of(source)):
        if size > 1 and (size,) != need.parts:
            yield Shard(dim, (size,), need.origin)


def _whole_written(op: Operator) -> tuple[fx.Node, Shard] | None:
    """A whole value into which a sharded one is written, and how it has to be sharded."""
    if not is_mutating(op.node):
        return None
    (first, *_), split = mutated_arguments(op.node), op.sharded()
    if first in split or not split:
        return None
    lead, placed = next(iter(split.items()))
    dim = placed.dim + len(shape_of(first)) - len(shape_of(lead))
    if dim < 0 or shape_of(first)[dim] != sum(placed.parts):
        return None
    return first, replace(placed, dim=dim)


def check_local(whole: Body, placed: BodyPlacements, local: Body, degree: int) -> None:
    """Check that the code computes on shards what the placements say.

    Args:
        whole: the body at whole sizes.
        placed: placements of its values.
        local: the body at a rank's sizes.
        degree: the number of ranks.

    Raises:
        Unshardable: it does something else there.
    """
    ours, theirs = list(whole.graph.nodes), list(local.graph.nodes)
    if len(ours) != len(theirs) or repr(whole.result) != repr(local.result):
        raise Unshardable("runs other operators on shards")
    place = {node: i for i, node in enumerate(ours)}
    local_place = {node: i for i, node in enumerate(theirs)}
    for node, own in zip(ours, theirs, strict=True):
        if node.op == "output":
            same = _written(node.args, place) == _written(own.args, local_place)
        else:
            expected = local_meta(node.meta["tensor"], placed.placements[node], degree)
            same = _shapes(expected) == _shapes(own.meta["tensor"])
        if same and node.op == "call_function":
            want = _call(node, placed.decisions[node], place, whole=True)
            same = want == _call(own, Decision(REPLICATE), local_place, whole=False)
        if not same:
            raise Unshardable(f"{node.name} in it is another operator on shards")


def _call(
    node: fx.Node, decision: Decision, place: Mapping[fx.Node, int], *, whole: bool
) -> tuple[Any, ...]:
    """An operator and its arguments, but for sizes, with values by their place in the graph."""
    target = node.target
    args, kwargs = node.args, dict(node.kwargs)
    if whole and decision.args is not None and family(target) not in _BY_SHAPE:
        target = decision.target or target
        args, kwargs = decision.args, dict(decision.kwargs or {})
    if not isinstance(target, torch._ops.OpOverload):
        return target, _written((args, kwargs), place)
    schema = target._schema.arguments
    found = {a.name: a.default_value for a in schema}
    found |= dict(zip((a.name for a in schema), args, strict=False)) | kwargs
    if family(target) in UNINITIALIZED:
        found.pop("memory_format", None)
    if "end" in found:
        found |= _extent(args[0], found)
    kept = {name: value for name, value in found.items() if name not in _SIZES}
    return target, _written(kept, place)


def _extent(source: Any, found: Mapping[str, Any]) -> dict[str, int]:
    """Where a slice begins and ends, however that is written."""
    size = shape_of(source)[positive(found["dim"], len(shape_of(source)))]
    ends = (found["start"] or 0, size if found["end"] is None else found["end"])
    start, end = (max(0, min(positive(int(end), size), size)) for end in ends)
    return {"start": start, "end": end}


def _written(value: Any, place: Mapping[fx.Node, int]) -> str:
    return repr(fx.map_arg(value, lambda n: _Place(place[n])))


class _Place(int):
    """The place of a value in its graph."""

    def __repr__(self) -> str:
        return f"value {int(self)}"


def _shapes(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_shapes, value))
    return None if value is None else (value.shape, value.dtype)
