"""Code generation: a segment's graph as a Python function."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from merak.graph.ir.operators import chooses_kernel, multiplies_groups, room_for_documents
from merak.graph.ir.torch_compiler import TorchCompiler
from merak.graph.program.compiled import compiled
from merak.graph.program.logical_draws import draw_in_logical_order, draws_by_memory
from merak.graph.program.masked_writes import write_where, writes_where
from merak.graph.segment.cut import copy_graph
from merak.graph.trace.branches.flags import is_condition
from merak.graph.trace.branches.outcomes import BranchValues, branch_values, specialize_branches
from merak.graph.trace.opaque.dynamic_region import dynamic_region_function
from merak.graph.trace.opaque.operator import is_dynamic_region, is_opaque
from merak.graph.trace.opaque.run import opaque_function
from merak.ops.grouped_product import grouped_product
from merak.ops.packed_attention import attend_packed

Function = Callable[..., tuple[torch.Tensor, ...]]

Observe = Callable[[fx.Node, Any], None]
"""Looks at a node and its result."""


class _Observed(fx.Interpreter):
    """Interpreter of a graph that lets somebody look at every node's result."""

    def __init__(self, graph: fx.Graph, observe: Observe) -> None:
        super().__init__(torch.nn.Module(), graph=graph)
        self._observe = observe

    def run_node(self, n: fx.Node) -> Any:
        """Run a node."""
        result = super().run_node(n)
        self._observe(n, result)
        return result


def runnable(
    graph: fx.Graph, observe: Observe | None = None, compiler: TorchCompiler | None = None
) -> Function:
    """Function that runs a graph's operators one after another.

    Args:
        graph: as traced, or rewritten for a rank's shard of it.
        observe: looks at every result, which takes time; None for nobody.
        compiler: of its operators by `torch.compile`; None runs them as they are.

    Returns:
        A function of the graph's placeholders, in order. Where a condition leaves a layer out,
        nothing of the layer runs.
    """
    places = [i for i, n in enumerate(graph.find_nodes(op="placeholder")) if is_condition(n)]
    whole = _function(graph, observe, compiler)
    if not places:
        return whole

    @lru_cache(maxsize=64)
    def chosen(answers: BranchValues) -> Function:
        return _function(specialize_branches(graph, answers), observe, compiler)

    def run(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        answers = branch_values([args[i] for i in places])
        return (whole if answers is None else chosen(answers))(*args)

    return run


def as_run(graph: fx.Graph) -> fx.Graph:
    """Graph with the operators that run in the place of those that stand for them.

    Args:
        graph: left as it is.
    """
    if not any(map(_is_replaced, graph.nodes)):
        return graph
    graph, _ = copy_graph(graph)
    for node in graph.nodes:
        if is_opaque(node):
            node.target = opaque_function(node.meta["opaque"])
        elif is_dynamic_region(node):
            node.target = dynamic_region_function(node.meta["region"])
        elif multiplies_groups(node):
            node.target = grouped_product
        elif chooses_kernel(node):
            node.kwargs = {**node.kwargs, "room": room_for_documents(node)}
            node.target = attend_packed
        elif writes_where(node):
            node.target = write_where
    draw_in_logical_order(graph)
    return graph


def _function(graph: fx.Graph, observe: Observe | None, compiler: TorchCompiler | None) -> Function:
    graph = as_run(graph)
    if observe is not None:
        return _Observed(graph, observe).run
    if compiler is not None:
        return compiled(graph, compiler)
    return fx.GraphModule(torch.nn.Module(), graph).forward


def _is_replaced(node: fx.Node) -> bool:
    is_own = is_opaque(node) or is_dynamic_region(node) or multiplies_groups(node)
    return is_own or chooses_kernel(node) or draws_by_memory(node) or writes_where(node)
