"""The optimizer's step: the norm of all gradients, overflow, clipping and the update."""

from __future__ import annotations

import torch

from merak.engine.comm.gradient_norm import global_norm, pipeline_norm
from merak.engine.state import EngineState


def gradient_norm(state: EngineState) -> torch.Tensor:
    """The global 2-norm of an engine's gradients, a scalar, the same on every rank.

    Args:
        state: of this rank's engine, whose step is over.
    """
    mesh, optimizer_params, shards = state.mesh, state.optimizer_params, state.base.shards
    counted = {n: item for n, item in optimizer_params.items.items() if n in state.owned}
    axes = ("tp", "pp", "dp") if optimizer_params.is_sharded else ("tp", "pp")
    peers = tuple(peer for axis in axes for peer in mesh.peers(axis))
    with state.progress.waiting(f"the gradient norm over {' and '.join(axes)} with", peers):
        if mesh.tp == 1 and not optimizer_params.is_sharded:
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
            mesh.tp,
            [mesh.group(axis) for axis in axes],
            mesh.device,
            {id(i.tensor): i.rows for i in counted.values() if i.rows is not None},
        )
