"""Groups of replicas that share out the optimizer (ZeRO): of all parameters, and of experts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class ReplicaGroups:
    """The replicas that hold the same numbers of a parameter, by its name.

    Args:
        everyone: all replicas, or the group of them that shards (`zero_group_size`); None where
            the optimizer is not shared out.
        same_experts: those with this rank's experts; None where it is the only one.
        experts: names of the parameters that are experts, of which other replicas hold others.
        of_copies: by name of a parameter, all replicas of all copies of its stage, where the
            schedule has several.
    """

    everyone: dist.ProcessGroup | None = None
    same_experts: dist.ProcessGroup | None = None
    experts: Collection[str] = ()
    of_copies: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)

    @property
    def is_shared_out(self) -> bool:
        """Whether replicas share out the optimizer of what is no expert."""
        return self.everyone is not None or bool(self.of_copies)

    def of(self, name: str) -> dist.ProcessGroup | None:
        """The replicas that share out a parameter's optimizer; None for this rank alone."""
        if name in self.of_copies:
            return self.of_copies[name]
        return self.same_experts if name in self.experts else self.everyone
