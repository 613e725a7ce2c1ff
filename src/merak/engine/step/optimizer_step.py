"""The end of a training step: the norm of all gradients, and whether they are finite."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from merak.core.mesh import REPLICAS
from merak.engine.comm.gradient_norm import global_norm, pipeline_norm
from merak.engine.state import EngineState
from merak.engine.step.loss_scale import LossScale


def gradient_norm(state: EngineState) -> torch.Tensor:
    """The global 2-norm of an engine's gradients, a scalar, the same on every rank.

    Args:
        state: of this rank's engine, whose step is over.
    """
    mesh, params, shards = state.mesh, state.optimizer_params, state.base.shards
    counted = {n: item for n, item in params.items.items() if n in state.owned}
    axes: tuple[str, ...] = ("pp", REPLICAS) if params.is_sharded else ("pp",)
    differs = not (params.is_sharded and mesh.spreads_experts)  # experts differ over replicas too
    if differs:
        axes = (mesh.shard_axis, *axes)
    peers = tuple(peer for axis in axes for peer in mesh.peers(axis))
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
            [mesh.group(axis) for axis in axes],
            mesh.device,
            {id(i.tensor): i.rows for i in counted.values() if i.rows is not None},
        )


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

    def fails(self, norm: torch.Tensor, losses: torch.Tensor | None = None) -> bool:
        """Check a step, and adapt the loss scale to it.

        Args:
            norm: of all gradients of the model.
            losses: of the step's microbatches; None leaves them unchecked.

        Returns:
            Whether something is NaN or infinite, so that the step must not reach the optimizer.
        """
        finite = torch.isfinite(norm)
        is_finite = bool(finite if losses is None else finite & torch.isfinite(losses).all())
        self.is_overflow = False
        if self.scaler is not None:
            self.is_overflow = not is_finite and self.scaler.may_overflow
            self.scaler.adapt(overflow=not is_finite)
        if is_finite:
            self.num_failed = 0
        elif not self.is_overflow:
            self.num_failed += 1
        return not is_finite
