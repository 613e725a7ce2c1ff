"""Sharding rules of operators on each channel of (samples, channels, …), or on groups of channels.

These are the norms over a batch, an instance, or groups of channels; pooling; and resizing. Running
statistics of a batch norm are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from merak.graph.ir.custom_operators import Role, register
from merak.graph.ir.operators import family
from merak.graph.tensor_parallel.placement import (
    REPLICATE,
    Decision,
    Operator,
    Placement,
    Shard,
    shape_of,
)
from merak.ops.collectives import gather_from, local_slice
from merak.ops.linear import sends

_CHANNELS = 1


def batch_norm(op: Operator) -> Decision:
    """batch_norm, instance_norm: by statistics of each channel.

    Running statistics are whole on every rank: where training updates them, each gets the others'.
    """
    is_batch = family(op.node.target) == "batch_norm"
    statistics = [op.arg("running_mean"), op.arg("running_var")]
    running = [n for n in statistics if n is not None]
    takes_own = op.arg("training" if is_batch else "use_input_stats")
    placed, needs = _placed(op)
    if placed.dim == 0:
        if takes_own and (is_batch or running):
            raise op.error("takes statistics over the samples of a batch")
        return Decision(placed)
    if not (takes_own and running):
        return Decision(placed, needs | dict.fromkeys(running, replace(placed, dim=0)))
    if not is_batch:
        raise op.error("updates running statistics of channels that are split")
    settings = [op.arg(name) for name in ("momentum", "eps", "cudnn_enabled")]
    own = (op.arg("input"), op.arg("weight"), op.arg("bias"), *statistics)
    args = (*own, *settings, list(placed.parts), op.axis)
    needs |= dict.fromkeys(running, REPLICATE)
    return Decision(placed, needs, sharded_batch_norm, args, {})


def group_norm(op: Operator) -> Decision:
    """group_norm: every rank has whole groups of channels."""
    groups = op.arg("num_groups")
    placed, needs = _placed(op)
    if placed.dim == 0:
        return Decision(placed)
    size = shape_of(op.node.args[0])[_CHANNELS] // groups
    if any(part % size for part in placed.parts):
        raise op.error("normalises groups of channels that are split inside")
    for part in placed.parts:
        op.local(part // size)
    return Decision(placed, needs, **op.replace(num_groups=op.local(groups)))


def _placed(op: Operator) -> tuple[Shard, dict[fx.Node, Placement]]:
    """Placement of a norm's operand, over samples or channels, and what it asks of the others."""
    operand: Any = op.node.args[0]
    placed, scales = op.placement(operand), [op.arg("weight"), op.arg("bias")]
    if not isinstance(placed, Shard):  # the weight is split
        placed = replace(next(iter(op.sharded().values())), dim=_CHANNELS)
    if placed.dim > _CHANNELS:
        raise op.error(f"normalises over dim {placed.dim}, which is split")
    along = replace(placed, dim=0)
    return placed, {operand: placed, **{n: along for n in scales if n is not None}}


_PIXEL_DIMS = {"1d": 1, "2d": 2, "3d": 3}


def each_channel(op: Operator) -> Decision:
    """Pooling, resizing, mirrored padding: what lies before the pixels is done one by one."""
    (operand, placed), *_ = op.sharded().items()
    name = family(op.node.target)
    num_dims = next(n for mark, n in _PIXEL_DIMS.items() if mark in name)
    if placed.dim >= len(shape_of(operand)) - num_dims:
        raise op.error(f"joins pixels along dim {placed.dim}, which is split")
    results = op.node.meta["tensor"]
    return Decision((placed,) * len(results) if isinstance(results, tuple) else placed)


aten = torch.ops.aten


def _sharded_batch_norm(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
    parts: Sequence[int],
    axis: str,
) -> torch.Tensor:
    """Batch norm by the statistics of a batch, of which a rank has some channels.

    Args:
        input: (samples, the rank's channels, …).
        weight: of the rank's channels.
        bias: of the rank's channels.
        running_mean: of all channels; updated, on every rank alike.
        running_var: of all channels; updated, on every rank alike.
        momentum: the weight of this batch in them.
        eps: added to the variance.
        cudnn_enabled: as of torch's batch_norm.
        parts: sizes of the fused parts of all channels, each split by itself.
        axis: the mesh axis.
    """
    layout = (1, tuple(parts), axis)
    with torch.no_grad():
        running = local_slice(torch.stack((running_mean, running_var)), *layout).contiguous()
    mean, var = running.unbind()
    settings = (True, momentum, eps, cudnn_enabled)
    result: torch.Tensor = aten.batch_norm.default(input, weight, bias, mean, var, *settings)
    with torch.no_grad():
        means, vars = gather_from(running, *layout).unbind()
        running_mean.copy_(means)
        running_var.copy_(vars)
    return result


sharded_batch_norm = register(
    "sharded_batch_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor(a!) running_mean, "
    "Tensor(b!) running_var, float momentum, float eps, bool cudnn_enabled, int[] parts, str axis)"
    " -> Tensor",
    Role.COLLECTIVE,
    _sharded_batch_norm,
    is_deterministic=True,
)
# the running statistics of all channels
sends(inside=lambda *a: (("all_gather", 2 * a[3].num_bytes, a[-1]),))(sharded_batch_norm)
