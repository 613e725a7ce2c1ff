"""Keys and values of fewer heads than ranks, repeated so that each rank gets those of its queries.

An all-to-all from tokens to heads gives each rank some heads. Where queries have enough of them and
the keys that they share have not, it sends every head of keys to as many ranks as read it: fewer
bytes than a ring, in which every rank gets all keys.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from merak.graph.ir.operators import family
from merak.graph.segment.cut import copy_graph
from merak.graph.tensor_parallel.placement import shape_of

aten = torch.ops.aten


def repeat_shared_heads(graph: fx.Graph, degree: int) -> fx.Graph:
    """Graph whose attention has heads of keys and values that ranks can share out.

    Args:
        graph: of a segment; left as it is.
        degree: the number of ranks.
    """
    if not any(_times(node, degree) > 1 for node in graph.nodes):
        return graph
    new, _ = copy_graph(graph)
    for node in list(new.nodes):
        times = _times(node, degree)
        if times > 1:
            for index in (1, 2):
                node.update_arg(index, _repeated(node, node.args[index], times))
    new.lint()
    return new


def _times(node: fx.Node, degree: int) -> int:
    """How often each head of keys is needed, for ranks to have as many each; 1 to leave all."""
    if family(node.target) != "scaled_dot_product_attention" or not node.kwargs.get("enable_gqa"):
        return 1
    query, key = (shape_of(operand) for operand in node.args[:2])
    if len(query) != 4 or query[0] % degree == 0:  # whole samples are shared out
        return 1
    heads = math.lcm(key[1], degree)
    return heads // key[1] if query[1] % heads == 0 else 1


def _repeated(attention: fx.Node, operand: Any, times: int) -> fx.Node:
    with attention.graph.inserting_before(attention):
        made = attention.graph.call_function(aten.repeat_interleave.self_int, (operand, times, 1))
    meta = operand.meta["tensor"]
    shape = (meta.shape[0], meta.shape[1] * times, *meta.shape[2:])
    made.meta = {**attention.meta, "tensor": replace(meta, shape=shape)}
    return made
