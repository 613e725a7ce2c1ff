"""Rows that a loss takes from all replicas, such as the negatives of a contrastive loss.

A trace has them as one operator; its rows are another replica's, so that all run it together.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import is_fake

from merak.core.mesh import current_mesh
from merak.graph.ir.custom_operators import Role, register
from merak.graph.ir.ir import ModelGraph
from merak.ops.collectives import gather_replicas


def _replica_rows(rows: torch.Tensor, degree: int) -> torch.Tensor:
    if (is_fake(rows) or rows.is_meta) and current_mesh().device_mesh is not None:
        return torch.cat([rows] * degree)  # for a trace, whose values nobody reads
    return gather_replicas(rows, 0, (degree * len(rows),))


REPLICA_ROWS = register(
    "replica_rows(Tensor rows, int degree) -> Tensor",
    Role.COLLECTIVE,
    _replica_rows,
    is_deterministic=True,
)
"""Rows of all replicas, (replicas x rows, …), of which the first are this one's; `degree` is dp.

The gradient of a replica's rows is the sum of what all replicas' losses have.
"""


def meets_replicas(graph: ModelGraph) -> bool:
    """Whether a graph takes rows from other replicas, which then run as many microbatches."""
    return any(
        segment.graph.find_nodes(op="call_function", target=REPLICA_ROWS)
        for segment in graph.segments
    )
