"""Products that autocast leaves in float32: those of operators that it does not know."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import fx

from merak.core.gradients import LOW_PRECISION
from merak.plan.cost.operators import node_work

_WORTH_SAYING = 0.05
"""Part of the products from which on something is said."""


def float32_products(graphs: Iterable[tuple[fx.Graph, int]]) -> str | None:
    """A sentence on products in float32 beside others in 16 bits, such as those with experts.

    Args:
        graphs: of the segments, and how often each is in the model.

    Returns:
        The sentence without its full stop; None where autocast is off, or casts nearly all.
    """
    flops: dict[tuple[str, torch.dtype], float] = defaultdict(float)
    for graph, times in graphs:
        for node in graph.nodes:
            for own in node_work(node, "cuda").forward:
                flops[_name(node.target), own.dtype] += own.flops * times
    low = {dtype for (_, dtype), own in flops.items() if own and dtype in LOW_PRECISION}
    slow = {name: own for (name, dtype), own in flops.items() if own and dtype == torch.float32}
    share = sum(slow.values()) / max(sum(flops.values()), 1.0)
    if not low or share <= _WORTH_SAYING:
        return None
    dtype = str(low.pop()).removeprefix("torch.")
    return (
        f"{share:.0%} of the products are in float32, since autocast does not cast "
        f"{max(slow, key=lambda name: slow[name])}; with parameters in {dtype} and float32 masters "
        f"(master_weights) they are in {dtype}"
    )


def _name(target: object) -> str:
    """An operator without its namespace and overload."""
    return str(target).split(".")[-2].lstrip("_") if "." in str(target) else str(target)
