"""Condition nodes of a graph: booleans, each of which decides whether a layer runs."""

from __future__ import annotations

import torch
from torch import fx

from merak.graph.ir.ir import Kind, Segment
from merak.graph.ir.operators import SEPARATE_EXPERTS, family
from merak.graph.trace.opaque.operator import is_opaque, operands


def mark_condition(node: fx.Node) -> None:
    """Mark a node as a condition, for all that read it."""
    node.meta["is_condition"] = True


def is_condition(node: fx.Node) -> bool:
    """Whether a node is a boolean that decides whether a layer runs."""
    return bool(node.meta.get("is_condition"))


def optional_parameters(segment: Segment) -> tuple[str, ...]:
    """Parameters of a segment that a step may leave without a gradient.

    Some answer to its conditions skips them, an opaque module may not use them, or they are of an
    expert that no token chooses.
    """
    graph = segment.graph
    if not any(_is_optional(node) for node in graph.nodes):
        return ()
    always: dict[fx.Node, frozenset[str]] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and node.meta["kind"] is Kind.PARAMETER:
            always[node] = frozenset((node.meta["name"],))
        elif is_branch_select(node):
            always[node] = always[node.args[1]] & always[node.args[2]]
        elif _skips_idle(node):
            rows, _, offsets = node.args[:3]
            always[node] = always[rows] | always[offsets]
        elif is_opaque(node):
            every = enumerate(operands(node))
            reached = [always[n] for i, n in every if i in node.meta["opaque"].always_used]
            always[node] = frozenset().union(*reached)
        else:
            always[node] = frozenset().union(*(always[n] for n in node.all_input_nodes))
    output = graph.output_node()
    return tuple(name for name in segment.parameters if name not in always[output])


def _is_optional(node: fx.Node) -> bool:
    """Whether an operator may leave some of its operands without a gradient."""
    return is_condition(node) or is_opaque(node) or _skips_idle(node)


def _skips_idle(node: fx.Node) -> bool:
    """Whether an operator reads parameters of each expert, and skips experts without rows."""
    return family(node.target) in SEPARATE_EXPERTS and bool(node.args[3])


def is_branch_select(node: fx.Node) -> bool:
    """Whether a node selects one of two values by a condition."""
    condition = node.args[0] if node.target is torch.ops.aten.where.self else None
    return isinstance(condition, fx.Node) and is_condition(condition)
