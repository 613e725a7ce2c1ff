"""Seconds of the optimizer's step: kernels that only move bytes, and the norm of gradients."""

from __future__ import annotations

from collections.abc import Sequence

from merak.plan.cluster.cluster import Cluster
from merak.plan.cluster.collectives import collective_seconds
from merak.plan.cluster.groups import group_of
from merak.plan.cost.device import DeviceProfile
from merak.plan.memory.model import StageMemory
from merak.plan.memory.zero import ZeroSharding
from merak.plan.price.candidate import Candidate
from merak.plan.price.stages import Stage

FOREACH_PASSES = 80 / 28
"""Bytes that torch's default optimizers move, as a multiple of those of a fused one.

AdamW's step by lists (`foreach`) reads and writes 80 bytes for a float32 parameter, operator by
operator (torch/optim/adamw.py); a fused one 28.
"""


def update_seconds(
    stages: Sequence[tuple[Stage, StageMemory]],
    device: DeviceProfile,
    zero: ZeroSharding,
    is_fused: bool,
    *,
    clips: bool = True,
) -> float:
    """Seconds of the optimizer's step and of clipping.

    Args:
        stages: that are stepped, each with its memory, for its optimizer state.
        device: what computes.
        zero: what replicas shard.
        is_fused: whether the optimizer is fused.
        clips: whether gradients are clipped before.
    """
    trained = {
        name: meta
        for stage, _ in stages
        for name, meta in stage.parameters.items()
        if meta.requires_grad
    }
    if not trained:
        return 0.0
    # Masters are part of the state.
    state = sum(memory.optimizer for _, memory in stages)
    gradients = sum(zero.gradient_bytes(trained).values()) / zero.degree
    parameters = sum(meta.num_bytes for meta in trained.values()) / zero.degree
    stepped = 2 * state + gradients + 2 * parameters
    passes = 1.0 if is_fused else FOREACH_PASSES
    clipping = 3 * gradients if clips else 0.0
    if device.calibration is not None:
        passes *= device.calibration.update(parameters)
    return (passes * stepped + clipping) / device.memory_bytes_per_s


def norm_seconds(cluster: Cluster, candidate: Candidate) -> float:
    """Seconds in which all ranks agree on the norm of the gradients."""
    groups = [(candidate.tp, 1), (candidate.pp, candidate.stage_ranks)]
    groups += [(candidate.replicas, candidate.tp)] if candidate.zero else []
    return sum(collective_seconds("all_reduce", 8, group_of(cluster, *own)) for own in groups)
