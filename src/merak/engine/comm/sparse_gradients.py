"""Sparse gradients of embedding tables: sparse on one rank, dense where they are reduced.

A table's gradient is sparse where its look-ups ask for it (`nn.Embedding(sparse=True)`). Reductions
over replicas go in buckets, sums over segments travel between stages, and a table that is split
over tp looks up rows that other ranks hold: there the look-ups give a dense gradient of the same
values.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import fx

from merak.core.errors import ScheduleError
from merak.core.mesh import Mesh
from merak.core.rank0 import warn_on_rank0
from merak.core.shards import ParameterShard
from merak.graph.ir.ir import Kind, ModelGraph, Segment
from merak.graph.segment.cut import copy_graph
from merak.plan.layout import Layout

logger = logging.getLogger(__name__)


def find_densified(layout: Layout, mesh: Mesh) -> frozenset[str]:
    """The parameters with sparse gradients in the model that have dense ones in a layout.

    Args:
        layout: the model, laid out.
        mesh: the grid of ranks.
    """
    found = find_sparse(layout.graph)
    if mesh.replicas > 1 or mesh.tp > 1 or len(layout.schedule.pipes) > 1:
        return frozenset(found)
    return frozenset(name for name, num_segments in found.items() if num_segments > 1)


def find_sparse(graph: ModelGraph) -> dict[str, int]:
    """The parameters that get sparse gradients → the number of segments that read each."""
    names = {name for segment in graph.segments for name in _sparse_of(segment.graph).values()}
    return {
        name: sum(name in segment.parameters for segment in graph.segments)
        for name in sorted(names)
    }


def warn_densified(names: Collection[str]) -> None:
    """Warn on rank 0 of gradients that are dense in this layout, as large as their tables."""
    if names:
        warn_on_rank0(
            logger,
            "The sparse gradients of %s are dense in this layout, as large as the tables, since "
            "they are summed over ranks or segments. The numbers are the same.",
            ", ".join(sorted(names)),
        )


def densify(names: Collection[str], segment: Segment) -> tuple[Segment, dict[str, ParameterShard]]:
    """Replace sparse gradients of a segment's embeddings by dense ones."""
    if set(names).isdisjoint(_sparse_of(segment.graph).values()):
        return segment, {}
    graph, _ = copy_graph(segment.graph)
    for node, name in _sparse_of(graph).items():
        place = _arguments(node).index("sparse")
        if name in names and place < len(node.args):
            node.update_arg(place, False)
        elif name in names:
            node.update_kwarg("sparse", False)
    return replace(segment, graph=graph), {}


def refuse_sparse_optimizer(
    optimizer: torch.optim.Optimizer | None, densified: Collection[str]
) -> None:
    """Refuse an optimizer of sparse gradients alone where gradients are dense.

    Args:
        optimizer: of this rank; None for none.
        densified: as of `find_densified`.

    Raises:
        ScheduleError: it would meet a dense gradient.
    """
    if isinstance(optimizer, torch.optim.SparseAdam) and densified:
        raise ScheduleError(
            f"SparseAdam takes sparse gradients alone, but that of {sorted(densified)[0]} is "
            "summed over ranks or segments, which makes it dense; use Adam or SGD, or a layout "
            "with dp=1 and tp=1."
        )


def _sparse_of(graph: fx.Graph) -> Mapping[fx.Node, str]:
    """The look-ups that give sparse gradients → the parameter that each looks up in."""
    found = {}
    for node in graph.nodes:
        if node.op != "call_function" or "sparse" not in (names := _arguments(node)):
            continue
        place = names.index("sparse")
        is_sparse = node.args[place] if place < len(node.args) else node.kwargs.get("sparse", False)
        weight = node.args[0] if node.args else node.kwargs.get(names[0])
        is_read = is_sparse and isinstance(weight, fx.Node) and weight.op == "placeholder"
        if is_read and weight.meta["kind"] is Kind.PARAMETER:
            found[node] = weight.meta["name"]
    return found


def _arguments(node: fx.Node) -> list[str]:
    """Names of the arguments of an operator of torch's or of Merak's own."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return [argument.name for argument in target._schema.arguments]
    if getattr(target, "__module__", "").startswith("merak."):
        return list(inspect.signature(target).parameters)  # type: ignore[arg-type]
    return []
