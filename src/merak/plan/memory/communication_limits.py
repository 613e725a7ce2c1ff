"""Limits on open collectives, which the engine obeys and the memory model counts."""

from __future__ import annotations

MAX_OPEN_BUCKETS = 2
"""Open reduce-scatters of gradient buckets where every microbatch reduces its gradients."""


MAX_OPEN_GATHERS = 4
"""Open all-gathers of parameter buckets where gradients are sharded and memory is scarce."""


def level_bytes(num_bytes: int, *, is_sharded: bool) -> int:
    """Most bytes that a collective by hierarchy holds beside its tensors.

    It has shards for the collective between nodes, at most one half where two ranks are on a node,
    and where ranks have shards of their own a copy in the order of the levels.

    Args:
        num_bytes: of the whole tensor.
        is_sharded: whether it is a reduce-scatter or an all-gather.
    """
    return num_bytes // 2 + num_bytes * is_sharded
