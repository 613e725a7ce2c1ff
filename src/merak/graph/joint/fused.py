"""What a compiled backward computes again: chains of elementwise operators, where that saves bytes.

torch fuses elementwise operators into one kernel with what reads them, so they cost little to run
again. What is saved is then the cheapest cut between what cannot be computed again and what the
backward reads: a smallest cut of a network whose capacities are bytes.

Source: arXiv:1604.06174 (recomputation of cheap operators); `torch._functorch.partitioners` cuts
compiled graphs so.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Set

import torch
from torch import fx

from merak.graph.ir.ir import Kind
from merak.graph.ir.mutation import mutated_arguments
from merak.graph.ir.operators import is_pointwise
from merak.graph.ir.reachable import Edge, reachable, source_side
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
