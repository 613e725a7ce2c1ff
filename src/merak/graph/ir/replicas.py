"""What a model or its loss takes from all replicas: rows, such as negatives of a batch, and sums.

A trace has each as one operator over the replicas, so that all run it together.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import is_fake

from merak.core.mesh import current_mesh
from merak.graph.ir.custom_operators import Role, register
from merak.graph.ir.ir import ModelGraph
from merak.ops.collectives import gather_replicas, sum_replicas


def _is_traced(tensor: torch.Tensor) -> bool:
    """Whether a trace runs an operator, whose values nobody reads."""
    return (is_fake(tensor) or tensor.is_meta) and current_mesh().device_mesh is not None


def _replica_rows(rows: torch.Tensor, degree: int) -> torch.Tensor:
    if _is_traced(rows):
        return torch.cat([rows] * degree)
    return gather_replicas(rows, 0, (degree * len(rows),))


def _replica_sum(summand: torch.Tensor) -> torch.Tensor:
    return summand.clone() if _is_traced(summand) else sum_replicas(summand)


REPLICA_ROWS = register(
    "replica_rows(Tensor rows, int degree) -> Tensor",
    Role.COLLECTIVE,
    _replica_rows,
    is_deterministic=True,
)
"""Rows of all replicas, (replicas x rows, …), in the replicas' order; `degree` is dp.

The gradient of a replica's rows is the sum of what all replicas' losses have.
"""

REPLICA_SUM = register(
    "replica_sum(Tensor summand) -> Tensor",
    Role.COLLECTIVE,
    _replica_sum,
    is_deterministic=True,
)
"""Sum over all replicas; its gradient is the sum of what all replicas' losses have."""

OF_REPLICAS = (REPLICA_ROWS, REPLICA_SUM)
"""Operators by which a replica meets the others; what they return is the same on all of them."""


def meets_replicas(graph: ModelGraph) -> bool:
    """Whether a graph takes anything from other replicas, which then run as many microbatches."""
    return any(
        segment.graph.find_nodes(op="call_function", target=target)
        for segment in graph.segments
        for target in OF_REPLICAS
    )
