"""Structural keys: equal for graphs that do the same, and found once for a graph."""

from __future__ import annotations

import torch
from torch import fx

from merak.graph.ir.structure import structural_key, structure_of_graph


def graph_of(names: tuple[str, str], factor: float = 2.0) -> fx.Graph:
    """A graph that multiplies its input, under names that do not matter."""
    graph = fx.Graph()
    x = graph.placeholder(names[0])
    y = graph.call_function(torch.ops.aten.mul.Tensor, (x, factor))
    y.name = names[1]
    graph.output((y,))
    return graph


def test_graphs_that_differ_in_names_alone_have_equal_structures():
    one, other = graph_of(("x", "y")), graph_of(("a", "b"))
    assert structural_key(one) == structural_key(other)
    assert structure_of_graph(one) == structure_of_graph(other)
    assert len({structure_of_graph(one), structure_of_graph(other)}) == 1


def test_what_is_computed_counts():
    one, other = graph_of(("x", "y")), graph_of(("x", "y"), factor=3.0)
    assert structure_of_graph(one) != structure_of_graph(other)
    assert structure_of_graph(one) != structural_key(one)


def test_a_graph_is_looked_at_once():
    graph = graph_of(("x", "y"))
    assert structure_of_graph(graph) is structure_of_graph(graph)
