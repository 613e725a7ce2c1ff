"""Division of a joint graph into parts, and the values between them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from merak.graph.ir.ir import Kind
from merak.graph.ir.mutation import mutated_arguments
from merak.graph.joint.clean import is_view
from merak.graph.joint.deferred import Deferred, find_deferred
from merak.graph.joint.derive import JointGraph
from merak.graph.joint.fused import cut
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
    forward = [node for node in calls if not node.meta["is_backward"]]
    backward = [node for node in calls if node.meta["is_backward"]]
    read = [n for node in backward for n in node.all_input_nodes] + list(joint.gradients.values())
    casts = _casts(forward)
    again, saved = _made_again(dict.fromkeys(filter(_is_of_forward, read)), casts)
    if fuses:
        fused, saved = cut(saved, forward)
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
