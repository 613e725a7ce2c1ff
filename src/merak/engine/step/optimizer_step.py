"""The end of a training step: the norm of all gradients, and whether they are finite."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from merak.core.mesh import REPLICAS
from merak.engine.comm.gradient_buckets import others_of
from merak.engine.comm.gradient_norm import global_norm, pipeline_norm
from merak.engine.state import EngineState
from merak.engine.step.loss_scale import LossScale


def gradient_norm(state: EngineState) -> torch.Tensor:
    """The global 2-norm of an engine's gradients, a scalar, the same on every rank.

    Args:
        state: of this rank's engine, whose step is over.
    """
    mesh, params, shards = state.mesh, state.optimizer_params, state.base.shards
    own = {*state.owned, *params.of_copies}
    counted = {name: item for name, item in params.items.items() if name in own}
    axes: tuple[str, ...] = ("pp", REPLICAS) if params.is_sharded else ("pp",)
    differs = not (params.is_sharded and mesh.spreads_experts)  # experts differ over replicas too
    if differs:
        axes = (mesh.shard_axis, *axes)
    groups = {axis: mesh.group(axis) for axis in axes}
    if REPLICAS in groups:
        groups[REPLICAS] = params.sharing  # others have the same shards
    peers = tuple(p for own in groups.values() if own is not None for p in others_of(own))
    with state.progress.waiting(f"the gradient norm over {' and '.join(axes)} with", peers):
        if mesh.shard_degree == 1 and not params.is_sharded:
            gradients = {n: item.tensor.grad for n, item in counted.items()}
            return pipeline_norm(
                {name: g for name, g in gradients.items() if g is not None},
                state.norm_order,
                mesh.group("pp"),
                mesh.device,
            )
        return global_norm(
            [item.tensor for item in counted.values()],
            {id(i.tensor): shards[n] for n, i in counted.items() if n in shards},
            mesh.shard_degree if differs else 1,
            list(groups.values()),
            mesh.device,
            {id(i.tensor): i.rows for i in counted.values() if i.rows is not None},
        )


def runs_behind(device: torch.device) -> bool:
    """Whether a device runs behind the host, which waits for it where it reads a tensor."""
    return device.type not in ("cpu", "meta")


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """Loss, norm and finiteness of a step as numbers of the host, equal on all ranks.

    Args:
        is_finite: whether its losses and the norm of its gradients are.
        has_finite_loss: whether its losses are.
        loss: their sum.
        norm: of all gradients of the model.
        loss_scale: of fp16 in the step; 1 without.
    """

    is_finite: bool
    has_finite_loss: bool
    loss: float
    norm: float
    loss_scale: float


class StepEnd:
    """Loss, norm and finiteness of a step as device tensors, being copied to the host.

    Args:
        norm: of all gradients of the model, a scalar.
        losses: of the step's microbatches.
        loss_scale: of fp16, a scalar; None without.
    """

    def __init__(
        self, norm: torch.Tensor, losses: torch.Tensor, loss_scale: torch.Tensor | None = None
    ) -> None:
        self.has_finite_loss = torch.isfinite(losses).all()
        """A boolean scalar on the device."""
        is_finite = torch.isfinite(norm) & self.has_finite_loss
        self.non_finite = (~is_finite).float()
        """1 if a loss or gradient is NaN or infinite, else 0: a scalar on the device."""
        scale = torch.ones_like(norm) if loss_scale is None else loss_scale
        found = (is_finite, self.has_finite_loss, losses.sum(), norm, scale)
        self._numbers = torch.stack([one.to(norm.dtype) for one in found])
        self._arrival: torch.Event | None = None
        if runs_behind(norm.device):
            numbers = torch.empty_like(self._numbers, device="cpu", pin_memory=True)
            self._numbers = numbers.copy_(self._numbers, non_blocking=True)
            self._arrival = torch.Event(norm.device.type)
            self._arrival.record()

    def read(self) -> StepNumbers:
        """The numbers; waits until the device has made them, the only time that a step does."""
        if self._arrival is not None:
            self._arrival.synchronize()
        finite, has_finite_loss, *rest = self._numbers.tolist()
        return StepNumbers(finite == 1, has_finite_loss == 1, *rest)


@dataclass(slots=True)
class FiniteCheck:
    """Finds the steps whose gradients are not finite; all ranks find the same ones.

    Args:
        scaler: the loss scale of fp16, whose overflows are no fault of the model; None without.
    """

    scaler: LossScale | None
    num_failed: int = field(default=0, init=False)
    """Contiguous steps that were not finite, without the overflows of the loss scale."""
    is_overflow: bool = field(default=False, init=False)
    """Whether the last step was an overflow that a lower loss scale may avoid."""

    def end(self, norm: torch.Tensor, losses: torch.Tensor) -> StepEnd:
        """The end of a step; adapts the loss scale to it, on the device.

        Args:
            norm: of all gradients of the model.
            losses: of the step's microbatches.
        """
        end = StepEnd(norm, losses, None if self.scaler is None else self.scaler.current())
        if self.scaler is not None:
            self.scaler.adapt(end.non_finite)
        return end

    def fails(self, found: StepNumbers) -> bool:
        """Whether a step is not finite, so that it must not reach the optimizer.

        Args:
            found: at its end; steps come one after another.
        """
        # At a scale of 1 or less the step itself is to blame.
        self.is_overflow = not found.is_finite and found.loss_scale > 1.0
        if found.is_finite:
            self.num_failed = 0
        elif not self.is_overflow:
            self.num_failed += 1
        return not found.is_finite
