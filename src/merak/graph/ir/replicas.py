"""What a model or its loss takes from all replicas: rows, such as negatives of a batch, and sums.

A trace has each as one operator over the replicas, so that all run it together.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._subclasses.fake_tensor import is_fake

from merak.graph.ir.custom_operators import Role, register
from merak.graph.ir.ir import ModelGraph
from merak.graph.ir.mutation import find_mutations
from merak.graph.ir.operators import aten_family
from merak.graph.ir.reachable import reachable
from merak.ops.collectives import gather_replicas, sum_replicas
from merak.ops.linear import sends
from merak.ops.recording import is_recorded


def _is_traced(tensor: torch.Tensor) -> bool:
    """Whether a trace runs an operator, whose values nobody reads."""
    return (is_fake(tensor) or tensor.is_meta) and not is_recorded()


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

sends("all_gather", "reduce_scatter", axis="dp")(REPLICA_ROWS)
sends("all_reduce", "all_reduce", axis="dp")(REPLICA_SUM)

OF_REPLICAS = (REPLICA_ROWS, REPLICA_SUM)
"""Operators by which a replica meets the others; what they return is the same on all of them."""


def does_meet(node: fx.Node) -> bool:
    """Whether an operator takes anything from other replicas, or runs Python that does."""
    call = node.meta.get("opaque")
    return node.target in OF_REPLICAS or (call is not None and bool(call.meets_replicas))


def meets_replicas(graph: ModelGraph) -> bool:
    """Whether a graph takes anything from other replicas, which then run as many microbatches."""
    return any(does_meet(node) for segment in graph.segments for node in segment.graph.nodes)


OWN = "knows its replica"
"""Key of what `mark_own` notes of a node."""


def mark_own(graph: fx.Graph) -> None:
    """Note that each replica's graph is another one: what it takes of all may be its own part."""
    for target in OF_REPLICAS:
        for node in graph.find_nodes(op="call_function", target=target):
            node.meta[OWN] = True


def is_same_on_replicas(node: fx.Node) -> bool:
    """Whether an operator makes the same value on all replicas, of values that are not."""
    return node.target in OF_REPLICAS and OWN not in node.meta


def read_results_for_writes(graph: fx.Graph) -> None:
    """Read what comes of other replicas itself, where it is read from a tensor it is written into.

    Collectives of torch write into tensors of the model's; nothing of what was there stays.
    """
    writes = find_mutations(graph)
    order = {node: i for i, node in enumerate(graph.nodes)}
    met = [n for n in graph.nodes if n.target in OF_REPLICAS]
    for node in reachable(met, lambda n: n.users):
        memory = node.meta.get("storage")
        if aten_family(node.target) != "copy_" or writes.writers.get(memory) != [node]:
            continue
        value, members = node.args[1], writes.members[memory]
        is_whole = all(
            member.op == "call_function" and (i == 0 or aten_family(member.target) in _SAME)
            for i, member in enumerate(members)
        )
        if not (isinstance(value, fx.Node) and is_whole and _is_like(value, members[0])):
            continue
        for member in members:
            for user in [u for u in member.users if order[u] > order[node]]:
                user.replace_input_with(member, value)
        graph.erase_node(node)


_SAME = ("copy_", "detach", "alias")


def _is_like(one: fx.Node, other: fx.Node) -> bool:
    first, second = one.meta["tensor"], other.meta["tensor"]
    return bool((first.shape, first.dtype) == (second.shape, second.dtype))
