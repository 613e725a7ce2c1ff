"""Division of a joint graph into parts, and the values between them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from merak.graph.joint.clean import is_view
from merak.graph.joint.derive import JointGraph
from merak.ops.collectives import GATHERED_AGAIN


@dataclass(frozen=True, slots=True)
class Division:
    """Parts of a joint graph.

    Args:
        forward: operators of the forward, in order.
        backward: operators of the backward, in order; with what it makes again.
        saved: values that the forward makes and the backward reads.
    """

    forward: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]
    saved: tuple[fx.Node, ...]


def divide(joint: JointGraph) -> Division:
    """Divide a joint graph at the values that the backward reads.

    Views of arguments are made again in the backward, and what was gathered is gathered again.
    """
    calls = [node for node in joint.graph.nodes if node.op == "call_function"]
    forward = [node for node in calls if not node.meta["is_backward"]]
    backward = [node for node in calls if node.meta["is_backward"]]
    read = [n for node in backward for n in node.all_input_nodes] + list(joint.gradients.values())
    again, saved = _made_again(dict.fromkeys(filter(_is_of_forward, read)))
    order: dict[fx.Node, None] = {}
    for node in backward:
        _append(order, node, again)
    for node in joint.gradients.values():
        _append(order, node, again)
    return Division(tuple(forward), tuple(order), tuple(saved))


def _is_of_forward(node: fx.Node) -> bool:
    return node.op == "call_function" and not node.meta["is_backward"]


def _append(order: dict[fx.Node, None], node: fx.Node, again: set[fx.Node]) -> None:
    """Append a node, behind those of `again` that it reads."""
    for argument in node.all_input_nodes:
        if argument in again:
            _append(order, argument, again)
    if node in again or (node.op == "call_function" and node.meta["is_backward"]):
        order.setdefault(node)


def _made_again(values: Iterable[fx.Node]) -> tuple[set[fx.Node], list[fx.Node]]:
    """Nodes that the backward makes again for some values of the forward, and what it saves."""
    again: set[fx.Node] = set()
    saved: dict[fx.Node, None] = {}
    waiting = list(values)
    while waiting:
        value = waiting.pop(0)
        chain, end = _chain(value)
        if end.target in GATHERED_AGAIN:
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
