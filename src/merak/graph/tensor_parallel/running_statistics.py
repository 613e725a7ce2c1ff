"""Batch norm of a rank's channels, with running statistics that are whole on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from merak.graph.ir.custom_operators import Role, register
from merak.ops.collectives import gather_from, local_slice
from merak.ops.linear import sends

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
