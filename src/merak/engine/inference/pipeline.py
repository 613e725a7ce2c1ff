"""The ranks of a pipeline that call a model together, and what they send each other meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from merak.core.mesh import Mesh
from merak.engine.health.status import Progress
from merak.graph.weights.rank_agreement import transfer_device


@dataclass(slots=True)
class Pipeline:
    """The ranks of a pipeline, which call a model together.

    Args:
        mesh: the grid of ranks.
        progress: reports waits for other ranks.
        num_made: how many placed tensors there were.
        num_writes: how many functions have written into placed tensors. Copies are from before or
            from after: which tensors share memory is not the same on all ranks.
    """

    mesh: Mesh
    progress: Progress
    num_made: int = 0
    num_writes: int = 0

    @property
    def everyone(self) -> frozenset[int]:
        """All of its ranks, as pp ranks."""
        return frozenset(range(self.mesh.pp))

    def broadcast(self, value: torch.Tensor | None, like: torch.Tensor, root: int) -> torch.Tensor:
        """A tensor of one rank on all.

        Args:
            value: the tensor, on the root.
            like: of its size and type.
            root: a pp rank.
        """
        mesh = self.mesh
        group = mesh.group("pp")
        if group is None:
            assert value is not None
            return value
        sent = _buffer(value, like, mesh.device)
        if sent.numel():
            with self.progress.waiting("a value on", mesh.peers("pp")):
                dist.broadcast(sent, src=mesh.rank_at(root), group=group)
        return sent

    def broadcast_object(self, value: object, root: int) -> Any:
        """An object of one rank on all."""
        mesh = self.mesh
        group = mesh.group("pp")
        if group is None:
            return value
        box = [value]
        with self.progress.waiting("a value on", mesh.peers("pp")):
            device = transfer_device(mesh.device)
            dist.broadcast_object_list(box, src=mesh.rank_at(root), group=group, device=device)
        return box[0]

    def send(
        self, value: torch.Tensor | None, like: torch.Tensor, root: int, target: frozenset[int]
    ) -> torch.Tensor | None:
        """A tensor of one rank on some others; None on the rest.

        Args:
            value: the tensor, on the root.
            like: of its size and type.
            root: a pp rank.
            target: pp ranks without it.
        """
        mesh, group, own = self.mesh, self.mesh.group("pp"), self.mesh.pp_rank
        if own != root and own not in target:
            return None
        sent = _buffer(value, like, mesh.device)
        if not sent.numel():
            return sent
        if own == root:
            for other in sorted(target):
                with self.progress.waiting("a value to", (mesh.rank_at(other),)):
                    dist.send(sent, mesh.rank_at(other), group)
        else:
            with self.progress.waiting("a value from", (mesh.rank_at(root),)):
                dist.recv(sent, mesh.rank_at(root), group)
        return sent


def _buffer(value: torch.Tensor | None, like: torch.Tensor, device: torch.device) -> torch.Tensor:
    if value is None:
        return torch.empty(like.shape, dtype=like.dtype, device=device)
    return value.detach().to(device).contiguous()
