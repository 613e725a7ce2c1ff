"""A segment's graph as a Python function."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from merak.core.collectives import gather_copied
from merak.core.regather import keeping_shares


def runnable(graph: fx.Graph) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Generate the function that runs a graph's operators one after another.

    Args:
        graph: as traced, or rewritten for a rank's share of it.

    Returns:
        A function of the graph's placeholders, in order; what it gathers from shares of the
        sequence is kept for the backward as shares.
    """
    forward = fx.GraphModule(torch.nn.Module(), graph).forward
    if any(node.target is gather_copied for node in graph.nodes):
        return keeping_shares(forward)
    return forward
