"""Local SGD and DiLoCo: replicas step on their own, and exchange parameters every so many steps.

A round is `local_steps` optimizer steps of every data parallel replica, each with the gradients of
its own microbatches. At its end all replicas have the same parameters again:

- "average": the mean of theirs;
- "nesterov" (DiLoCo): an outer SGD with Nesterov momentum steps the parameters that they had in
  common before the round, the anchor; its gradient is what they have changed, the mean over
  replicas of anchor − parameter.

Each rank exchanges what its own stages hold, in buckets, with the ranks of the other replicas that
hold the same. Optimizer states stay each replica's own.

Source: arXiv:1805.09767 (Local SGD), algorithm 1; arXiv:2311.08105 (DiLoCo), algorithm 1.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from merak.core.gradients import is_low_precision
from merak.core.mesh import Mesh
from merak.engine.comm.gradient_buckets import Bucket, fill_buckets
from merak.engine.health.status import Progress
from merak.plan.engine_options import EngineOptions


def averaging_buckets(
    stages: Iterable[Sequence[str]],
    tensors: Mapping[str, nn.Parameter],
    tied: Collection[str],
    bucket_bytes: int,
) -> tuple[Bucket, ...]:
    """Group what a rank's optimizer steps into buckets, which are averaged over replicas.

    A sum's last bits depend on where in a bucket it is. All copies of a stage therefore have equal
    buckets, and a parameter that several stages read has one of its own.

    Args:
        stages: of each of this rank's stages, the names of its parameters in its order.
        tensors: what the optimizer steps, by name.
        tied: names of parameters that several segments read.
        bucket_bytes: a bucket is full as soon as it holds this much.
    """
    buckets: list[Bucket] = []
    seen: set[str] = set()
    for names in stages:
        own = [n for n in dict.fromkeys(names) if n in tensors and n not in seen]
        seen.update(own)
        buckets += fill_buckets((tensors[n] for n in own if n not in tied), bucket_bytes)
        buckets += [(tensors[n],) for n in own if n in tied]
    return tuple(buckets)


@dataclass(frozen=True, slots=True)
class Outer:
    """The outer optimizer of DiLoCo.

    Args:
        anchors: by id of what the inner optimizer steps, its copy from the start of the round.
        optimizer: steps the anchors.
    """

    anchors: Mapping[int, nn.Parameter]
    optimizer: torch.optim.SGD

    def momentum(self, tensor: nn.Parameter) -> torch.Tensor:
        """The momentum of a tensor that the inner optimizer steps."""
        found: torch.Tensor = self.optimizer.state[self.anchors[id(tensor)]]["momentum_buffer"]
        return found


def _outer(tensors: Iterable[nn.Parameter], options: EngineOptions) -> Outer:
    anchors = {id(t): nn.Parameter(t.detach().clone()) for t in tensors}
    momentum = options.outer_momentum
    optimizer = torch.optim.SGD(
        anchors.values(),
        lr=options.outer_learning_rate,
        momentum=momentum,
        nesterov=momentum > 0,
    )
    for anchor in anchors.values():  # as SGD starts it; here already for a checkpoint to fill
        optimizer.state[anchor]["momentum_buffer"] = torch.zeros_like(anchor)
    return Outer(anchors, optimizer)


class LocalSteps:
    """The rounds of Local SGD on one rank.

    Args:
        tensors: what this rank's optimizer steps, by name.
        buckets: the same, in the buckets that are averaged.
        mesh: the grid of ranks.
        progress: reports every wait.
        options: of the job, with `local_steps` above 0.
    """

    def __init__(
        self,
        tensors: Mapping[str, nn.Parameter],
        buckets: Sequence[Bucket],
        mesh: Mesh,
        progress: Progress,
        options: EngineOptions,
    ) -> None:
        self.num_replicas = mesh.dp
        self._tensors = tensors
        self._buckets = buckets
        self._group = mesh.group("dp")
        self._peers = mesh.peers("dp")
        self._progress = progress
        self._num_steps = options.local_steps
        self._outer = (
            _outer(tensors.values(), options) if options.outer_optimizer == "nesterov" else None
        )
        self._num_taken = 0

    @property
    def is_inside_round(self) -> bool:
        """Whether replicas have stepped on their own since they last had equal parameters."""
        return self._num_taken > 0

    @torch.no_grad()
    def start_step(self) -> None:
        """Keep the parameters as the anchor, before the first step of a round."""
        if self._outer is not None and not self._num_taken:
            for tensor in self._tensors.values():
                self._outer.anchors[id(tensor)].copy_(tensor)

    def end_step(self) -> None:
        """Count a step of the optimizer; after the last one of a round, end the round."""
        self._num_taken += 1
        if self._num_taken == self._num_steps:
            self.end_round()

    @torch.no_grad()
    def end_round(self) -> bool:
        """Give all replicas the same parameters, if they have stepped; they call it together.

        Returns:
            Whether they have.
        """
        if not self._num_taken:
            return False
        self._num_taken = 0
        for bucket in self._buckets:
            if self._outer is None:
                self._average(bucket)
            else:
                self._step_outer(bucket, self._outer)
        return True

    def _average(self, bucket: Bucket) -> None:
        if self._group is not None:
            for tensor, mean in zip(bucket, self._means(bucket), strict=True):
                tensor.copy_(mean)

    def _step_outer(self, bucket: Bucket, outer: Outer) -> None:
        anchors = [outer.anchors[id(tensor)] for tensor in bucket]
        changes = [anchor - tensor for anchor, tensor in zip(anchors, bucket, strict=True)]
        for anchor, mean in zip(anchors, self._means(changes), strict=True):
            anchor.grad = mean.to(anchor.dtype)
        outer.optimizer.step()  # which leaves anchors without a gradient alone
        outer.optimizer.zero_grad()
        for tensor, anchor in zip(bucket, anchors, strict=True):
            tensor.copy_(anchor)

    def _means(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The means of some tensors of one type over replicas, summed in float32 or better."""
        dtype = torch.float32 if is_low_precision(tensors[0]) else tensors[0].dtype
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).to(dtype)
        self._sum(flat, "the mean of the parameters with")
        pieces = flat.div_(self.num_replicas).split([tensor.numel() for tensor in tensors])
        return [piece.view_as(t) for piece, t in zip(pieces, tensors, strict=True)]

    def _sum(self, tensor: torch.Tensor, what: str) -> None:
        if self._group is not None:
            with self._progress.waiting(what, self._peers):
                dist.all_reduce(tensor, group=self._group)

    def agree_on_finite(self, norm: torch.Tensor) -> torch.Tensor:
        """A replica's norm of gradients, or NaN where that of some replica is not finite.

        Replicas clip to norms of their own, but skip the same steps. All call it together.

        Args:
            norm: of this replica's gradients, a scalar.
        """
        failed = (~torch.isfinite(norm)).float()
        self._sum(failed, "whether gradients are finite on")
        return torch.where(failed > 0, torch.nan, norm)

    def momenta(self) -> dict[str, torch.Tensor]:
        """The outer momentum by parameter name, for checkpoints; nothing without one."""
        if self._outer is None:
            return {}
        return {name: self._outer.momentum(tensor) for name, tensor in self._tensors.items()}

    @torch.no_grad()
    def average_states(
        self, optimizer: torch.optim.Optimizer, whole: Mapping[str, torch.Tensor]
    ) -> None:
        """Average the replicas' optimizer states, of which a checkpoint has one; collective.

        Numbers that are not floating-point, counts, and what some replica does not have yet stay.

        Args:
            optimizer: of this rank's tensors.
            whole: by name what it steps whole, in the place of all ranks' shards.
        """
        if self._group is None:
            return
        own: dict[tuple[str, str], torch.Tensor] = {
            (name, key): value
            for name, tensor in {**self._tensors, **whole}.items()
            for key, value in optimizer.state.get(tensor, {}).items()
            if _can_average(value, tensor)
        }
        held: list[Any] = [None] * self.num_replicas
        with self._progress.waiting("the optimizer states of", self._peers):
            dist.all_gather_object(held, list(own), group=self._group)
        everywhere = set(own).intersection(*held)
        for place, value in own.items():
            if place in everywhere:
                self._sum(value, "the mean of the optimizer states with")
                value.div_(self.num_replicas)


def _can_average(value: object, tensor: torch.Tensor) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.device == tensor.device
        and value.dim() > 0
    )
