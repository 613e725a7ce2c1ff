"""Groups of replicas that share out the optimizer (ZeRO): of all parameters, and of experts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class ReplicaGroups:
    """The replicas that hold the same numbers of a parameter, by its name.

    Args:
        everyone: all replicas, or the group of them that shards (`zero_group_size`); None where
            the optimizer is not shared out.
        same_experts: those with this rank's experts; None where it is the only one.
        experts: names of the parameters that are experts, of which other replicas hold others.
    """

    everyone: dist.ProcessGroup | None = None
    same_experts: dist.ProcessGroup | None = None
    experts: Collection[str] = ()

    def of(self, name: str) -> dist.ProcessGroup | None:
        """The replicas that share out a parameter's optimizer; None for this rank alone."""
        return self.same_experts if name in self.experts else self.everyone
