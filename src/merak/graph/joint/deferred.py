"""What of a backward may be left for later: the gradients of weights that nothing else waits for.

Zero-bubble schedules run what other stages wait for, the gradient of a stage's input, as soon as
they can, and the gradients of its weights where there would be a bubble. An operator is left for
later if it ends in gradients of weights alone, unless no product is among what leads to the
gradient and what is read for it takes more memory: so it is with the sums for norms and biases.

Source: arXiv:2401.10241, section 2.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from merak.graph.ir.mutation import mutated_arguments
from merak.graph.ir.reachable import reachable
from merak.graph.joint.clean import has_effect, is_view
from merak.graph.joint.derive import JointGraph

aten = torch.ops.aten

_PRODUCTS = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten._grouped_mm.default,
    }
)


@dataclass(frozen=True, slots=True)
class Deferred:
    """Operators of a backward that are left for later.

    Args:
        nodes: the operators.
        parameters: numbers of the parameters whose gradients they make.
    """

    nodes: frozenset[fx.Node] = frozenset()
    parameters: frozenset[int] = frozenset()


def find_deferred(
    joint: JointGraph, backward: Sequence[fx.Node], deferrable: Collection[int]
) -> Deferred:
    """Find what of a backward may be left for later.

    What writes, draws or sends stays where it is. Where no gradient of an input is asked for, only
    the products themselves are left for later.

    Args:
        joint: the graph.
        backward: its operators of the backward, in order.
        deferrable: numbers of the parameters whose gradients may come later.
    """
    own = frozenset(backward)
    late = {n: g for n, g in joint.gradients.items() if n in deferrable and g in own}
    soon = [g for n, g in joint.gradients.items() if n not in late]
    if soon:
        nodes = own - _needed([*soon, *_fixed(joint, backward)], own)
    else:
        ends = frozenset[fx.Node]().union(*map(_product, late.values()))
        nodes = ends - _needed([*(own - ends), *_fixed(joint, backward)], own)
    lasting = {
        argument.meta["layout"].storage
        for number, argument in enumerate(joint.arguments)
        if number not in joint.inputs
    }
    for gradient in late.values():
        chain = nodes & _needed([gradient], own)
        if any(node.target in _PRODUCTS for node in chain):
            continue
        rest = nodes - chain
        spared = _held_bytes(nodes, lasting) - _held_bytes(rest, lasting)
        if spared >= gradient.meta["layout"].storage_bytes:
            nodes = rest
    return Deferred(nodes, frozenset(n for n, gradient in late.items() if gradient in nodes))


def _needed(nodes: Iterable[fx.Node], among: frozenset[fx.Node]) -> frozenset[fx.Node]:
    """Nodes with all that they need, and all results of each."""

    def following(node: fx.Node) -> list[fx.Node]:
        parts = [user for user in node.users if user.target is operator.getitem]
        return parts + [n for n in node.all_input_nodes if n in among]

    return frozenset(reachable((node for node in nodes if node in among), following))


def _fixed(joint: JointGraph, backward: Sequence[fx.Node]) -> list[fx.Node]:
    """Operators that write, draw or send, and those that use memory into which one then writes."""
    writes: dict[int, float] = {}
    for place, node in enumerate(backward):
        writes |= {n.meta["layout"].storage: place for n in mutated_arguments(node)}
    # The next microbatch writes into those of arguments again.
    writes |= dict.fromkeys(writes.keys() & _storages(joint.arguments), math.inf)
    return [
        node
        for place, node in enumerate(backward)
        if has_effect(node)
        or any(place < writes.get(s, -1) for s in _storages((node, *node.all_input_nodes)))
    ]


def _storages(nodes: Iterable[fx.Node]) -> set[int]:
    layouts = [node.meta["layout"] for node in nodes]
    return {layout.storage for layout in layouts if layout is not None}


def _product(gradient: fx.Node) -> frozenset[fx.Node]:
    """The product that makes a gradient, with what lays it out anew; nothing if none does."""
    found, node = [gradient], gradient
    while (is_view(node) or node.target is aten._to_copy.default) and len(node.args) > 0:
        (node,) = node.all_input_nodes
        if node.op != "call_function" or not node.meta["is_backward"]:
            return frozenset()
        found.append(node)
    return frozenset(found) if node.target in _PRODUCTS else frozenset()


def _held_bytes(nodes: frozenset[fx.Node], lasting: Collection[int]) -> int:
    """Bytes of the storages that some nodes read of others, without those that last anyway."""
    layouts = [
        argument.meta["layout"]
        for node in nodes
        for argument in node.all_input_nodes
        if argument not in nodes
    ]
    held = {layout.storage: layout.storage_bytes for layout in layouts if layout is not None}
    return sum(size for storage, size in held.items() if storage not in lasting)
