"""Division of a joint graph into parts, and the values between them."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import dataclass

import torch
from torch import fx

from merak.graph.ir.ir import Kind
from merak.graph.ir.mutation import mutated_arguments
from merak.graph.ir.operators import is_pointwise
from merak.graph.ir.reachable import Edge, reachable, source_side
from merak.graph.joint.clean import has_effect, is_view
from merak.graph.joint.deferred import Deferred, find_deferred
from merak.graph.joint.derive import JointGraph
from merak.graph.joint.recomputed import Recomputation, find_recomputed
from merak.ops.collectives import GATHERED_AGAIN


@dataclass(frozen=True, slots=True)
class Division:
    """Parts of a joint graph.

    Args:
        forward: operators of the forward, in order.
        backward: operators of the backward, in order; with what it makes again.
        saved: values that the forward makes and the backward reads.
        weights: operators that are left for later, in order; with what they make again.
        held: values that these read of what the forward and the backward have made or were given.
        deferred: numbers of the parameters whose gradients these make.
        recomputation: what makes the saved values again, where the forward saves less.
    """

    forward: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]
    saved: tuple[fx.Node, ...]
    weights: tuple[fx.Node, ...]
    held: tuple[fx.Node, ...]
    deferred: frozenset[int]
    recomputation: Recomputation


def divide(
    joint: JointGraph,
    deferrable: Collection[int] = (),
    keeps: Collection[str] = (),
    fuses: bool = False,
) -> Division:
    """Divide a joint graph at the values that the backward reads.

    Views of arguments and casts of parameters are made again in the backward, and what was gathered
    is gathered again.

    Args:
        joint: the graph.
        deferrable: numbers of the parameters whose gradients may be made later, behind what other
            stages wait for.
        keeps: names of the segment's operators whose results a forward keeps that saves nothing
            else.
        fuses: whether elementwise operators are fused, and run again where that saves bytes.
    """
    calls = [node for node in joint.graph.nodes if node.op == "call_function"]
    calls = [node for node in calls if not node.meta.get("is_added")]  # by another division
    forward = [node for node in calls if not node.meta["is_backward"]]
    backward = [node for node in calls if node.meta["is_backward"]]
    read = [n for node in backward for n in node.all_input_nodes] + list(joint.gradients.values())
    casts = _casts(forward)
    again, saved = _made_again(dict.fromkeys(filter(_is_of_forward, read)), casts)
    if fuses:
        fused, saved = _fused_again(saved, forward)
        gathered, saved = _made_again(saved, casts)
        again |= fused | gathered
    later = find_deferred(joint, backward, deferrable) if deferrable else Deferred()
    now = [node for node in backward if node not in later.nodes]
    kept = [g for number, g in joint.gradients.items() if number not in later.parameters]
    behind = [node for node in backward if node in later.nodes]
    weights = _ordered(behind, [], {n for n in again if n.target not in GATHERED_AGAIN})
    made = {*weights, *joint.arguments}
    held = dict.fromkeys(n for node in weights for n in node.all_input_nodes if n not in made)
    return Division(
        tuple(forward),
        _ordered([*now, *held], kept, again),  # which gathers in the order of all ranks
        tuple(saved),
        weights,
        tuple(held),
        later.parameters,
        find_recomputed(forward, saved, keeps),
    )


def _ordered(
    nodes: Iterable[fx.Node], results: Iterable[fx.Node], again: set[fx.Node]
) -> tuple[fx.Node, ...]:
    """Nodes in order, each behind those of `again` that it reads."""
    order: dict[fx.Node, None] = {}
    for node in (*nodes, *results):
        _append(order, node, again)
    return tuple(order)


def _is_of_forward(node: fx.Node) -> bool:
    return node.op == "call_function" and not node.meta["is_backward"]


def _append(order: dict[fx.Node, None], node: fx.Node, again: set[fx.Node]) -> None:
    """Append a node, behind those of `again` that it reads."""
    for argument in node.all_input_nodes:
        if argument in again:
            _append(order, argument, again)
    if node in again or (node.op == "call_function" and node.meta["is_backward"]):
        order.setdefault(node)


def _casts(forward: Sequence[fx.Node]) -> set[fx.Node]:
    """Casts of parameters, or of views of them, into which nobody writes."""
    written = {n.meta["layout"].storage for node in forward for n in mutated_arguments(node)}
    casts = [node for node in forward if node.target is torch.ops.aten._to_copy.default]
    return {
        cast
        for cast in casts
        if _chain(cast.all_input_nodes[0])[1].meta.get("kind") is Kind.PARAMETER
        and cast.meta["layout"].storage not in written
    }


def _made_again(
    values: Iterable[fx.Node], casts: set[fx.Node]
) -> tuple[set[fx.Node], list[fx.Node]]:
    """Nodes that the backward makes again for some values of the forward, and what it saves.

    Args:
        values: that it reads.
        casts: of parameters.
    """
    again: set[fx.Node] = set()
    saved: dict[fx.Node, None] = {}
    waiting = list(values)
    while waiting:
        value = waiting.pop(0)
        chain, end = _chain(value)
        if end.target in GATHERED_AGAIN or end in casts:
            again.update((*chain, end))
            waiting += filter(_is_of_forward, end.all_input_nodes)
        elif end.op == "placeholder":
            again.update(chain)
        else:
            saved.setdefault(value)
    return again, list(saved)


def _chain(value: fx.Node) -> tuple[list[fx.Node], fx.Node]:
    """A value that is a view with the views between, and what it is a view of."""
    chain, node = [], value
    while node.op == "call_function" and is_view(node) and len(node.all_input_nodes) == 1:
        chain.append(node)
        node = node.all_input_nodes[0]
    return chain, node


aten = torch.ops.aten

_COPIES = (aten._to_copy.default, aten.clone.default, aten.cat.default)
"""Operators that are not elementwise and fuse as those do."""


def _fused_again(
    saved: Iterable[fx.Node], forward: Iterable[fx.Node]
) -> tuple[set[fx.Node], list[fx.Node]]:
    """Find which of a forward's operators a backward runs again, and what is saved instead.

    torch fuses elementwise operators into one kernel with what reads them, so they cost little to
    run again. What is saved is then the cheapest cut between what cannot be computed again and what
    the backward reads: a smallest cut of a network whose capacities are bytes.

    Source: arXiv:1604.06174 (recomputation of cheap operators); `torch._functorch.partitioners`
    cuts compiled graphs so.

    Args:
        saved: values that the backward reads.
        forward: operators of the forward, in order.

    Returns:
        The operators, and what is saved, in the forward's order.
    """
    order = list(forward)
    written = {n.meta["layout"].storage for node in order for n in mutated_arguments(node)}
    read = list(saved)

    def given(node: fx.Node) -> list[fx.Node]:
        return node.all_input_nodes if _is_cheap(node, written) else []

    # Backwards, so that what is in front of the cut is what the backward makes of what is saved.
    edges: list[Edge] = [("read", (node, "out"), math.inf) for node in read]
    seen = reachable(read, given)
    for node in seen:
        edges.append(((node, "out"), (node, "in"), _bytes(node)))
        if not _is_cheap(node, written):
            edges.append(((node, "in"), "fixed", math.inf))
        edges += [((node, "in"), (argument, "out"), math.inf) for argument in given(node)]
    made = source_side(edges, "read", "fixed")
    again = {node for node in seen if (node, "in") in made and node.op == "call_function"}
    kept = {node for node in seen if (node, "out") in made and (node, "in") not in made}
    return again, [node for node in order if node in kept]


def _is_cheap(node: fx.Node, written: Set[int]) -> bool:
    """Whether an operator costs little to run again, and finds what it found."""
    target = node.target
    if node.op != "call_function" or target is operator.getitem or has_effect(node):
        return False
    assert isinstance(target, torch._ops.OpOverload)
    is_fused = is_pointwise(target) or target in _COPIES or is_view(node)
    storages = [n.meta["layout"].storage for n in (node, *node.all_input_nodes) if n.meta["layout"]]
    return is_fused and written.isdisjoint(storages)


def _bytes(node: fx.Node) -> int:
    """Bytes that saving a value takes: none of what is there anyway."""
    layout = node.meta["layout"]
    is_lasting = node.op == "placeholder" and node.meta["kind"] is not Kind.VALUE
    return 0 if layout is None or is_lasting else int(layout.storage_bytes)
