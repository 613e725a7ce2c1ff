"""Outcomes of a graph's conditions, and the graph for given ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from merak.graph.ir.mutation import eliminate_dead_code
from merak.graph.trace.branches.flags import is_branch_select, is_condition

BranchValues = tuple[bool, ...]
"""Outcomes of a graph's conditions, in the order of its placeholders."""


def branch_values(conditions: Sequence[torch.Tensor]) -> BranchValues | None:
    """Outcomes of conditions; None for fake tensors, with which every branch runs."""
    if any(isinstance(condition, FakeTensor) or condition.is_meta for condition in conditions):
        return None
    with _disable_current_modes():  # such as one that makes all tensors fake
        return tuple(map(bool, conditions))


def specialize_branches(graph: fx.Graph, answers: BranchValues) -> fx.Graph:
    """Graph for given outcomes of its conditions, without the branches that are not taken.

    Args:
        graph: left as it is.
        answers: outcomes of its conditions, in the order of its placeholders, which it still has.
    """
    env: dict[fx.Node, fx.Node] = {}
    made = fx.Graph()
    made.output(made.graph_copy(graph, env))
    placeholders = list(made.find_nodes(op="placeholder"))
    conditions = dict(zip(filter(is_condition, placeholders), answers, strict=True))
    for node in list(made.nodes):
        if is_branch_select(node):
            condition, if_true, if_false = node.args
            node.replace_all_uses_with(if_true if conditions[condition] else if_false)
            made.erase_node(node)
    eliminate_dead_code(made, placeholders)
    return made
