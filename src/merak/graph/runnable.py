"""A segment's graph as a Python function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from merak.core.collectives import gather_copied
from merak.core.regather import keeping_shares
from merak.graph.choice import is_choice, is_taken
from merak.graph.writes import eliminate_dead_code

aten = torch.ops.aten

Function = Callable[..., tuple[torch.Tensor, ...]]


def runnable(graph: fx.Graph) -> Function:
    """Generate the function that runs a graph's operators one after another.

    Args:
        graph: as traced, or rewritten for a rank's share of it.

    Returns:
        A function of the graph's placeholders, in order; what it gathers from shares of the
        sequence is kept for the backward as shares. Where a choice leaves a layer out, nothing of
        the layer runs.
    """
    placeholders = list(graph.find_nodes(op="placeholder"))
    choices = [i for i, node in enumerate(placeholders) if is_choice(node)]
    whole = _function(graph)
    if not choices:
        return whole

    @cache
    def chosen(answers: tuple[bool, ...]) -> Function:
        return _function(_with_answers(graph, dict(zip(choices, answers, strict=True))))

    def run(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        truths: Sequence[Any] = [args[i] for i in choices]
        if any(isinstance(truth, FakeTensor) or truth.is_meta for truth in truths):
            return whole(*args)  # of what would run at the most
        with _disable_current_modes():  # such as one that makes all tensors fake
            answers = tuple(map(bool, truths))
        return chosen(answers)(*args)

    return run


def _function(graph: fx.Graph) -> Function:
    forward = fx.GraphModule(torch.nn.Module(), graph).forward
    if any(node.target is gather_copied for node in graph.nodes):
        return keeping_shares(forward)
    return forward


def _with_answers(graph: fx.Graph, answers: dict[int, bool]) -> fx.Graph:
    """A graph in which choices are made: without what they leave out."""
    env: dict[fx.Node, fx.Node] = {}
    made = fx.Graph()
    made.output(made.graph_copy(graph, env))
    placeholders = list(made.find_nodes(op="placeholder"))
    truths = {placeholders[i]: answer for i, answer in answers.items()}
    for node in list(made.nodes):
        if is_taken(node) and node.args[0] in truths:
            condition, if_true, if_false = node.args
            node.replace_all_uses_with(if_true if truths[condition] else if_false)
            made.erase_node(node)
    eliminate_dead_code(made, placeholders)
    return made
