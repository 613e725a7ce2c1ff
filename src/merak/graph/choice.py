"""Values that decide what runs of a segment: truths, of which each leaves a layer in or out."""

from __future__ import annotations

import torch
from torch import fx

from merak.graph.ir import Kind, Segment


def mark_choice(node: fx.Node) -> None:
    """From now on a node is such a truth, wherever it is read."""
    node.meta["is_choice"] = True


def is_choice(node: fx.Node) -> bool:
    """Whether a node is such a truth."""
    return bool(node.meta.get("is_choice"))


def optional_parameters(segment: Segment) -> tuple[str, ...]:
    """Parameters of a segment that some answer to its choices leaves without a gradient."""
    graph = segment.graph
    if not any(is_choice(node) for node in graph.find_nodes(op="placeholder")):
        return ()
    always: set[fx.Node] = set()
    (output,) = graph.find_nodes(op="output")
    todo = [output]
    while todo:
        node = todo.pop()
        if node in always:
            continue
        always.add(node)
        ways = [node.args[0]] if is_taken(node) else node.all_input_nodes
        todo += [way for way in ways if isinstance(way, fx.Node)]
    left = [n for n in graph.find_nodes(op="placeholder") if n not in always]
    return tuple(n.meta["name"] for n in left if n.meta["kind"] is Kind.PARAMETER)


def is_taken(node: fx.Node) -> bool:
    """Whether a node is one of two values, as a choice says."""
    condition = node.args[0] if node.target is torch.ops.aten.where.self else None
    return isinstance(condition, fx.Node) and is_choice(condition)
