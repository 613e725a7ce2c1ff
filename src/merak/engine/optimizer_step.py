"""The optimizer's step: the norm of all gradients, overflow, clipping and the update."""

from __future__ import annotations

import torch

from merak.engine.comm.gradient_norm import global_norm, pipeline_norm
from merak.engine.parts import Parts


def gradient_norm(parts: Parts) -> torch.Tensor:
    """The global 2-norm of an engine's gradients, a scalar, the same on every rank.

    Args:
        parts: of this rank's engine, whose step is over.
    """
    mesh, trained, shards = parts.mesh, parts.trained, parts.base.shards
    counted = {n: item for n, item in trained.items.items() if n in parts.owned}
    axes = ("tp", "pp", "dp") if trained.is_sharded else ("tp", "pp")
    peers = tuple(peer for axis in axes for peer in mesh.peers(axis))
    with parts.progress.waiting(f"the gradient norm over {' and '.join(axes)} with", peers):
        if mesh.tp == 1 and not trained.is_sharded:
            gradients = {n: item.stepped.grad for n, item in counted.items()}
            return pipeline_norm(
                {name: g for name, g in gradients.items() if g is not None},
                parts.norm_order,
                mesh.group("pp"),
                mesh.device,
            )
        return global_norm(
            [item.stepped for item in counted.values()],
            {id(i.stepped): shards[n] for n, i in counted.items() if n in shards},
            mesh.tp,
            [mesh.group(axis) for axis in axes],
            mesh.device,
            {id(i.stepped): i.rows for i in counted.values() if i.rows is not None},
        )
