"""Communication cost of a segment's sharding: the collectives of its rewriting."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import fx

from merak.core.errors import ShardError
from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import Kind
from merak.graph.ir.operators import (
    GROUPED_GEMMS,
    SAME_VALUES,
    SEPARATE_GEMMS,
    TRANSPOSES,
    family,
    weights_only,
)
from merak.graph.tensor_parallel.conversion import Step, Ways, entering, steps
from merak.graph.tensor_parallel.placement import (
    REPLICATE,
    PartlySharded,
    Placement,
    Shard,
    need_of,
    operands_of,
    shape_of,
)
from merak.graph.tensor_parallel.propagate import Propagation
from merak.ops.linear import SENDS, Sends


class Collective(Enum):
    """Collective of a conversion between placements: its kind, and where it runs."""

    REDUCE = ("all_reduce", "forward")
    GATHER = ("all_gather", "forward")
    COPY = ("all_reduce", "backward")
    SLICE = ("all_gather", "backward")
    SCATTER = ("reduce_scatter", "forward")
    SPREAD = ("reduce_scatter", "backward")
    INSIDE = ("all_reduce", "inside an operator, in the forward")


_BACKWARD = (Collective.COPY, Collective.SLICE, Collective.SPREAD)
FORWARD = frozenset(Collective) - frozenset(_BACKWARD)
ALL_REDUCES = frozenset((Collective.REDUCE, Collective.COPY, Collective.INSIDE))


@dataclass(frozen=True, slots=True)
class Transfer:
    """Collective of a rewritten segment, with its size.

    Args:
        kind: which one.
        numel: numbers in the whole value; where fewer are sent, in what an all-reduce sends as many
            for.
        of_weights: whether the value depends on parameters alone: their gradients are summed.
    """

    kind: Collective
    numel: int
    of_weights: bool


def conversions(graph: fx.Graph, propagation: Propagation) -> Iterator[tuple[fx.Node, Placement]]:
    """Conversions that operators and outputs ask for: values, and the placements they need."""
    seen: set[tuple[fx.Node, Placement]] = set()
    for node, need in _needs(graph, propagation):
        placed = propagation.placements[node]
        if need is not None and placed != need and (node, need) not in seen:
            seen.add((node, need))
            yield node, need


def _needs(graph: fx.Graph, propagation: Propagation) -> Iterator[tuple[fx.Node, Placement | None]]:
    for node in graph.nodes:
        if node.op == "output":
            yield from ((n, propagation.leaving(n)) for n in node.all_input_nodes)
        elif node.op == "call_function":
            decision = propagation.decisions[node]
            for operand in operands_of(node, decision):
                yield operand, need_of(operand, decision, propagation.placements)
            further = (n for _, args in decision.then for n in args if isinstance(n, fx.Node))
            yield from ((n, REPLICATE) for n in further)


def transfers(graph: fx.Graph, propagation: Propagation) -> list[Transfer]:
    """Collectives of a segment's rewriting, each as often as it runs.

    Args:
        graph: the segment's graph, before it is rewritten.
        propagation: what becomes of its operators.

    Raises:
        ShardError: a value would need a placement that no collective gives.
    """
    weights = weights_only(graph)
    found: dict[tuple[fx.Node, Collective, bool], Transfer] = {}

    def add(node: fx.Node, kind: Collective, apart: bool = False) -> None:
        meta = node.meta["tensor"]
        numel = math.prod(meta.shape) if isinstance(meta, TensorMeta) else 0
        placed = propagation.placements[node]
        if isinstance(placed, PartlySharded):  # of whole parts
            numel = numel * sum(placed.parts[i] for i in placed.whole) // sum(placed.parts)
        if isinstance(placed, Shard) and placed.copies > 1 and node.op == "placeholder":
            # Ranks with the same shard sum its gradient: they send less than in an all-reduce.
            numel = numel * (placed.copies - 1) // (propagation.degree - 1)
        found[node, kind, apart] = Transfer(kind, numel, node in weights)

    ways = Ways(scatters=propagation.scatters)
    for node, need in conversions(graph, propagation):
        placed = propagation.placements[node]
        assert not isinstance(placed, tuple)
        if isinstance(placed, PartlySharded) or isinstance(need, PartlySharded):
            raise ShardError(f"{node} would have to be joined from split and whole parts.")
        # What is gathered for split work and what is gathered whole are two values.
        is_shard = isinstance(placed, Shard) and placed.copies == 1
        apart = ways.scatters and is_shard and need == REPLICATE
        for step in steps(placed, need, ways):
            for kind in _kinds(step, has_gradient(node)):
                add(node, kind, apart)
    for node, placed in propagation.placements.items():
        if node.op == "placeholder" and has_gradient(node):
            first = entering(placed, propagation.degree, ways.axis)
            for kind in () if first is None else _kinds(first, True):
                add(node, kind)
    for node, decision in propagation.decisions.items():
        if decision.then:
            add(node, Collective.REDUCE)
    sums = [size for decision in propagation.decisions.values() for size in decision.sums]
    return [*found.values(), *(Transfer(Collective.INSIDE, size, False) for size in sums)]


def _kinds(step: Step, has_gradient: bool) -> Iterator[Collective]:
    """Collectives of one step, in the forward and in the backward."""
    sent = SENDS.get(step.target, Sends())
    if sent.there is not None:
        yield Collective((sent.there, "forward"))
    if sent.back is not None and has_gradient:
        yield Collective((sent.back, "backward"))


def has_gradient(node: fx.Node) -> bool:
    """Whether a value is one tensor that a gradient flows through."""
    meta = node.meta.get("tensor")
    return isinstance(meta, TensorMeta) and meta.requires_grad


def parameter_nodes(graph: fx.Graph) -> dict[str, fx.Node]:
    """Placeholders of a segment's parameters, by name."""
    nodes = graph.find_nodes(op="placeholder")
    return {n.meta["name"]: n for n in nodes if n.meta["kind"] is Kind.PARAMETER}


def active_share(node: fx.Node, tokens: int) -> float:
    """Fraction of a weight's numbers that one token is multiplied with, as of experts.

    Args:
        node: the weight, or a view of it.
        tokens: how many tokens there are.
    """
    found = 0.0
    for user in node.users:
        if family(user.target) in SAME_VALUES | TRANSPOSES:
            found = max(found, active_share(user, tokens))
        elif family(user.target) in GROUPED_GEMMS:
            rows, groups = (shape_of(n)[0] for n in user.args[:2])
            found = max(found, min(1.0, rows / (groups * tokens)))
        elif family(user.target) in SEPARATE_GEMMS:
            weights: Any = user.args[1]
            num_rows = shape_of(user.args[0])[0]
            found = max(found, min(1.0, num_rows / (len(weights) * tokens)))
        else:
            return 1.0
    return found or 1.0
