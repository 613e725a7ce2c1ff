"""Operators of a segment that one fused kernel computes.

Many published runs had fused kernels, by hand or by a compiler. One rule stands for them:
operators between matrix products that are pointwise or reductions, and follow one another, are one
kernel. It reads what comes from outside, writes what is read outside, and a byte an element for
every dropout's mask. Its backward computes inner values again.

A compiler such as torch.compile's fuses in this way; Megatron-LM (arXiv 2104.04473) has such
kernels by hand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import fx

from merak.plan.cost.operators import (
    Work,
    draws_mask,
    hands_gradient_on,
    is_fusible,
    is_linear,
    is_view,
    node_work,
    outputs,
)


class FusedGroup:
    """Operators that one kernel computes.

    Args:
        nodes: in order.
    """

    def __init__(self, nodes: list[fx.Node]) -> None:
        self.nodes = nodes
        inside = set(nodes)
        self._inputs: dict[fx.Node, list[fx.Node]] = {}
        for node in nodes:
            for source in node.all_input_nodes:
                if _producer(source) not in inside:
                    self._inputs.setdefault(source, []).append(node)
        self._written = [
            node for node in nodes if any(user not in inside for user in _readers(node))
        ]

    def forward(self) -> Work:
        """The work of its kernel in the forward."""
        masks = sum(_size(node) for node in self.nodes if draws_mask(node))
        return self._work(_bytes(self._inputs) + _bytes(self._written) + masks, forward=True)

    def backward(self) -> Work | None:
        """The work of its kernel in the backward; None where it has none."""
        trained = [node for node in self._inputs if _requires_grad(node)]
        if not any(_requires_grad(node) for node in self.nodes) or not trained:
            return None
        read = [node for node in self._inputs if self._is_read_again(node)]
        made = [node for node in trained if not self._passes(node)]
        if not made:
            return None
        gradients = [node for node in self._written if _requires_grad(node)]
        masks = sum(_size(node) for node in self.nodes if draws_mask(node))
        size = _bytes(read) + _bytes(gradients) + _bytes(made) + masks
        return self._work(size, forward=False)

    def _work(self, num_bytes: float, *, forward: bool) -> Work:
        functions = randoms = 0.0
        for node in self.nodes:
            work = node_work(node, "cuda")
            functions += sum(k.functions for k in (work.forward if forward else work.backward))
            randoms += _size(node) if forward and draws_mask(node) else 0
        return Work(num_bytes, functions=functions, randoms=randoms)

    def _is_read_again(self, node: fx.Node) -> bool:
        """Whether the backward reads an input of the forward."""
        return any(not is_linear(user) and _requires_grad(user) for user in self._after(node))

    def _passes(self, node: fx.Node) -> bool:
        """Whether an input's gradient is that of the output, unchanged."""
        return all(hands_gradient_on(user) and _same_size(node, user) for user in self._after(node))

    def _after(self, node: fx.Node) -> set[fx.Node]:
        """Operators of the group that compute with an input."""
        found: set[fx.Node] = set(self._inputs[node])
        for user in self.nodes:
            if any(_producer(source) in found for source in user.all_input_nodes):
                found.add(user)
        return found


def fused_groups(graph: fx.Graph) -> dict[fx.Node, FusedGroup]:
    """Return the group of every operator that is fused.

    Operators are in one group if they follow one another and as many other kernels lie before them,
    on the longest way from the inputs: so no group waits for another that waits for it.

    Args:
        graph: of a segment.
    """
    level: dict[fx.Node, int] = {}
    member: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        before = [level[source] for source in node.all_input_nodes]
        level[node] = max(before, default=0)
        if node.op != "call_function" or is_view(node):
            continue
        if not is_fusible(node):
            level[node] += 1
            continue
        own = [node]
        for source in map(_producer, node.all_input_nodes):
            # What only parameters go into, such as their conversion, is a kernel of its own.
            other = member.get(source)
            if other is None or other is own or level[source] != level[node]:
                continue
            other += [n for n in own if n not in other]
            for n in own:
                member[n] = other
            own = other
        member[node] = own
    order = {node: place for place, node in enumerate(graph.nodes)}
    made: dict[int, FusedGroup] = {}
    for own in member.values():
        if id(own) not in made:
            made[id(own)] = FusedGroup(sorted(own, key=order.__getitem__))
    return {node: made[id(own)] for node, own in member.items()}


def _producer(node: fx.Node) -> fx.Node:
    """What computes a node's values, seen through views."""
    while node.op == "call_function" and is_view(node):
        node = node.all_input_nodes[0]
    return node


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """What reads a node's values, seen through views."""
    for user in node.users:
        if user.op == "call_function" and is_view(user):
            yield from _readers(user)
        else:
            yield user


def _requires_grad(node: fx.Node) -> bool:
    return any(meta.requires_grad for meta in outputs(node))


def _bytes(nodes: Any) -> int:
    return sum(meta.num_bytes for node in nodes for meta in outputs(node))


def _size(node: fx.Node) -> int:
    return sum(meta.num_bytes // meta.dtype.itemsize for meta in outputs(node))


def _same_size(node: fx.Node, other: fx.Node) -> bool:
    return Counter(m.num_bytes for m in outputs(node)) == Counter(
        m.num_bytes for m in outputs(other)
    )
