"""Division of a joint graph into parts, and the values between them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from merak.graph.joint.clean import base_of, is_view
from merak.graph.joint.derive import JointGraph


@dataclass(frozen=True, slots=True)
class Division:
    """Parts of a joint graph.

    Args:
        forward: operators of the forward, in order.
        backward: operators of the backward, in order; views of arguments are made again.
        saved: values that the forward makes and the backward reads.
    """

    forward: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]
    saved: tuple[fx.Node, ...]


def divide(joint: JointGraph) -> Division:
    """Divide a joint graph at the values that the backward reads."""
    calls = [node for node in joint.graph.nodes if node.op == "call_function"]
    forward = [node for node in calls if not node.meta["is_backward"]]
    backward = [node for node in calls if node.meta["is_backward"]]
    read = {n: None for node in backward for n in node.all_input_nodes}
    read |= dict.fromkeys(joint.gradients.values())
    read = {n: None for n in read if n.op == "call_function" and not n.meta["is_backward"]}
    again = _views_of_arguments(read)
    saved = [node for node in read if node not in again]
    return Division(
        tuple(forward),
        (*(node for node in forward if node in again), *backward),
        tuple(saved),
    )


def _views_of_arguments(values: dict[fx.Node, None]) -> set[fx.Node]:
    """Of some values, those that are views of arguments, with the views between."""
    found: set[fx.Node] = set()
    for value in values:
        chain, node = [value], base_of(value) if is_view(value) else None
        while node is not None and node.op == "call_function":
            chain.append(node)
            node = base_of(node) if is_view(node) else None
        if node is not None and all(len(n.all_input_nodes) == 1 for n in chain):
            found.update(chain)
    return found
