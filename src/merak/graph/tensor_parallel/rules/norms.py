"""Sharding rules of reductions and norms, along a sharded dim or along others.

Norms over a batch, an instance or groups of channels, pooling and resizing work on each channel of
(samples, channels, …), or on groups of channels; running statistics are whole on every rank.
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
    PARTIAL,
    REPLICATE,
    REPLICATE_PARTIAL_GRAD,
    Decision,
    Operator,
    Placement,
    Shard,
    positive,
    shape_of,
)
from merak.graph.tensor_parallel.rules import vocabulary
from merak.graph.tensor_parallel.rules.elementwise import elementwise
from merak.ops.collectives import gather_from, local_slice
from merak.ops.linear import sends
from merak.ops.sharded_statistics import (
    sharded_layer_norm,
    sharded_rms_norm,
    sharded_std,
    sharded_var,
    sharded_weight_norm,
)

aten = torch.ops.aten


def normalize(op: Operator) -> Decision:
    """layer_norm, rms_norm: over a sharded dim if their weight is sharded, or they have none."""
    operand, weight, bias = op.node.args[0], op.arg("weight"), op.arg("bias")
    assert isinstance(operand, fx.Node)
    size, num_normal = len(shape_of(operand)), len(op.arg("normalized_shape"))
    own = {n: op.placement(n) for n in (weight, bias) if n is not None}
    placed, of_weight = op.placement(operand), next(iter(own.values()), REPLICATE)
    if isinstance(of_weight, Shard):
        # A gathered operand would do for a weight that is whole: the weight's placement decides.
        placed = replace(of_weight, dim=of_weight.dim + size - num_normal)
    elif not isinstance(placed, Shard):
        raise op.error("has a split bias")
    elif placed.dim < size - num_normal:
        return Decision(placed)
    elif own:
        raise op.error(f"normalises over dim {placed.dim}, which is split, by a whole weight")
    aligned = replace(placed, dim=placed.dim - size + num_normal)
    needs: dict[fx.Node, Placement] = {operand: placed, **dict.fromkeys(own, aligned)}
    if family(op.node.target) == "rms_norm":
        of_rms = (operand, weight, op.arg("eps"), num_normal, op.ranks())
        return Decision(placed, needs, sharded_rms_norm, of_rms, {})
    args = (operand, weight, bias, op.arg("eps", 1e-5), num_normal, op.ranks())
    return Decision(placed, needs, sharded_layer_norm, args, {})


def reduce(op: Operator) -> Decision:
    """sum, mean, var, amax, …: sums over the sharded dim become partial sums."""
    if op.arg("other") is not None:  # max and min of two tensors
        return elementwise(op)
    (operand, placed), *_ = op.sharded().items()
    num_dims = len(shape_of(operand))
    given = op.arg("dim")
    given = [given] if isinstance(given, int) else given
    dims = {positive(d, num_dims) for d in given or range(num_dims)}
    if placed.dim in dims:
        return _reduce_split(op, operand, sorted(dims))
    shift = 0 if op.arg("keepdim", False) else sum(d < placed.dim for d in dims)
    after = Shard(placed.dim - shift, placed.parts, placed.origin)
    results = op.node.meta["tensor"]
    return Decision((after,) * len(results) if isinstance(results, tuple) else after)


def _reduce_split(op: Operator, operand: fx.Node, dims: list[int]) -> Decision:
    name = family(op.node.target)
    if name == "logsumexp":
        return vocabulary.logsumexp(op)
    if name == "argmax":
        return vocabulary.argmax(op)
    if name in ("sum", "mean") and vocabulary.reads_padding(op):
        return vocabulary.reduce_sum(op)
    if name == "sum":
        return Decision(PARTIAL)
    if name == "mean":
        return Decision(PARTIAL, then=((aten.div.Scalar, (op.degree,)),))
    if name in ("var", "std"):
        correction = op.arg("correction", op.arg("unbiased", True))
        correction = 1.0 if correction is None else float(correction)
        args = (operand, dims, correction, bool(op.arg("keepdim", False)), op.ranks())
        target = sharded_std if name == "std" else sharded_var
        return Decision(REPLICATE, {}, target, args, {})
    raise op.error(f"takes {name} over a dim that is split")


def weight_norm(op: Operator) -> Decision:
    """_weight_norm: a weight scaled to a norm for each index of one dim."""
    weight, norms, dim = op.arg("v"), op.arg("g"), op.arg("dim", 0)
    if dim == -1:
        raise op.error("scales a split weight to one norm")
    placed = op.placement(weight)
    if not isinstance(placed, Shard):
        placed = op.sharded()[norms]
    if placed.dim == dim:
        return Decision(placed, dict.fromkeys((weight, norms), placed))
    needs: dict[fx.Node, Placement] = {weight: placed, norms: REPLICATE_PARTIAL_GRAD}
    args = (weight, norms, dim, op.ranks())
    return Decision(placed, needs, sharded_weight_norm, args, {})


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
        # Autograd is told nothing, as of torch's own kernel: another norm may have saved them.
        running_mean.data.copy_(means)
        running_var.data.copy_(vars)
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
