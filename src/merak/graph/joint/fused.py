"""What a compiled backward computes again: chains of elementwise operators, where that saves bytes.

torch fuses elementwise operators into one kernel with what reads them, so they cost little to run
again. What is saved is then the cheapest cut between what cannot be computed again and what the
backward reads: a smallest cut of a network whose capacities are bytes.

Source: arXiv:1604.06174 (recomputation of cheap operators); `torch._functorch.partitioners` cuts
compiled graphs so.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Set
from typing import Any

import torch
from torch import fx

from merak.graph.ir.ir import Kind
from merak.graph.ir.mutation import mutated_arguments
from merak.graph.ir.operators import is_pointwise
from merak.graph.joint.clean import has_effect, is_view

aten = torch.ops.aten

_COPIES = (aten._to_copy.default, aten.clone.default, aten.cat.default)
"""Operators that are not elementwise and fuse as those do."""


def cut(saved: Iterable[fx.Node], forward: Iterable[fx.Node]) -> tuple[set[fx.Node], list[fx.Node]]:
    """Find which of a forward's operators a backward runs again, and what is saved instead.

    Args:
        saved: values that the backward reads.
        forward: operators of the forward, in order.

    Returns:
        The operators, and what is saved, in the forward's order.
    """
    import networkx as nx  # takes a moment, which jobs that compile nothing do not need

    order = list(forward)
    written = {n.meta["layout"].storage for node in order for n in mutated_arguments(node)}
    network: Any = nx.DiGraph()
    waiting, seen = list(saved), set[fx.Node]()
    network.add_nodes_from(("source", "sink"))
    for node in waiting:
        network.add_edge((node, "out"), "sink")
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        network.add_edge((node, "in"), (node, "out"), capacity=_bytes(node))
        if not _is_cheap(node, written):
            network.add_edge("source", (node, "in"))
            continue
        for argument in node.all_input_nodes:
            network.add_edge((argument, "out"), (node, "in"))
            waiting.append(argument)
    _, (before, _) = nx.minimum_cut(network, "source", "sink")
    again = {node for node in seen if (node, "in") not in before and node.op == "call_function"}
    kept = {node for node in seen if (node, "in") in before and (node, "out") not in before}
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
