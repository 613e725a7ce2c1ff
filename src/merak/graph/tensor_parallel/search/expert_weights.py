"""Placements of experts that are each whole on one tensor parallel rank."""

from __future__ import annotations

from collections.abc import Collection

from merak.graph.ir.ir import ModelGraph
from merak.graph.tensor_parallel.placement import Shard
from merak.graph.tensor_parallel.search.experts import (
    check_experts,
    experts_of,
    refuse_other_readers,
)
from merak.graph.tensor_parallel.search.no_experts import no_experts
from merak.graph.tensor_parallel.search.search import Search


def expert_weights(model: ModelGraph, ep: int, excluded: Collection[str]) -> dict[str, Shard]:
    """Placements of a model's expert weights, each split over its experts.

    Args:
        model: the traced model.
        ep: the expert parallel degree.
        excluded: parameters whose placement is given.

    Returns:
        Placements by name.

    Raises:
        ShardError: there are no experts, the degree does not divide their number, or something else
            reads their weights.
    """
    found: dict[str, Shard] = {}
    refuse_other_readers(model, ep, only_separate=True)
    for segment in model.segments:
        experts = {n: w for n, w in experts_of(segment).items() if n not in excluded}
        for name, weight in experts.items():
            check_experts(name, weight.num_experts, ep)
        if experts:
            own = {name: weight.placed(name, ep) for name, weight in experts.items()}
            search = Search(segment, model.parameters, ep, excluded, own)
            closed = search.close(own)
            found |= {n: p for n, p in closed.items() if isinstance(p, Shard)}
    if not found:
        raise no_experts(model, ep)
    return found
