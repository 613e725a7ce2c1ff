"""Norms and variances over a dim that is sharded, by all-reduces of a few numbers a position.

As torch does, statistics are taken in float32 of narrower dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from merak.core.mesh import current_mesh
from merak.ops.collectives import all_gather, axis_degree
from merak.ops.linear import Sent, operator_sends, sends
from merak.ops.recording import one_operator
from merak.ops.vocab_parallel import all_reduce_sum


def _moments_sent(values: Any, dims: Sequence[int], count: int, axis: str) -> Sent:
    """So many numbers of float32 for each position of the other dims."""
    taken = {dim % len(values.shape) for dim in dims}
    positions = math.prod(n for dim, n in enumerate(values.shape) if dim not in taken)
    return (("all_reduce", 4 * count * positions, axis),)


@sends(inside=lambda x, *how: _moments_sent(x, _last(how[-2]), 2, how[-1]))
def sharded_layer_norm(
    values: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    num_dims: int,
    axis: str,
) -> torch.Tensor:
    """Layer norm of values whose normalised dims are sharded.

    Args:
        values: the rank's slice along one of the last dims; all ranks' are equally large.
        weight: the rank's slice of the weight, or None.
        bias: that of the bias, or None.
        eps: added to the variance.
        num_dims: how many of the last dims are normalised.
        axis: the mesh axis.

    Returns:
        The rank's slice of the result. Its backward all-reduces two numbers for each position.
    """
    result: torch.Tensor = _Norm.apply(  # type: ignore[no-untyped-call]
        values, weight, bias, (eps, _last(num_dims), True, axis)
    )
    return result


@sends(inside=lambda x, *how: _moments_sent(x, _last(how[-2]), 1, how[-1]))
def sharded_rms_norm(
    values: torch.Tensor, weight: torch.Tensor | None, eps: float | None, num_dims: int, axis: str
) -> torch.Tensor:
    """RMS norm of values whose normalised dims are sharded.

    Args:
        values: the rank's slice along one of the last dims; all ranks' are equally large.
        weight: the rank's slice of the weight, or None.
        eps: added to the mean square; None for the smallest step of the dtype it is taken in.
        num_dims: how many of the last dims are normalised.
        axis: the mesh axis.

    Returns:
        The rank's slice of the result. Its backward all-reduces a number for each position.
    """
    added = torch.finfo(_wide(values.dtype)).eps if eps is None else eps
    result: torch.Tensor = _Norm.apply(  # type: ignore[no-untyped-call]
        values, weight, None, (added, _last(num_dims), False, axis)
    )
    return result


@sends(inside=lambda x, _, dim, axis: (("all_reduce", 4 * x.shape[dim], axis),))
def sharded_weight_norm(
    weight: torch.Tensor, norms: torch.Tensor, dim: int, axis: str
) -> torch.Tensor:
    """Weight scaled to a norm for each index of one dim, where another dim is sharded.

    Args:
        weight: the rank's slice along the other dim; all ranks' are equally large.
        norms: whole, of size 1 in all dims but `dim`. Its gradient is this rank's part.
        dim: the dim.
        axis: the mesh axis.

    Returns:
        The rank's slice of the result. Its backward all-reduces a number for each index.
    """
    dims = tuple(own for own in range(weight.ndim) if own != dim)
    unit: torch.Tensor = _Norm.apply(  # type: ignore[no-untyped-call]
        weight, None, None, (0.0, dims, False, axis)
    )
    return unit * (norms / math.sqrt(_count(weight, dims, axis)))


@sends(inside=lambda x, dims, *how: _moments_sent(x, dims, 2, how[-1]))
def sharded_var(
    values: torch.Tensor, dims: Sequence[int], correction: float, keepdim: bool, axis: str
) -> torch.Tensor:
    """Variance over dims, of which one is sharded.

    Args:
        values: the rank's slice along one of the dims; all ranks' are equally large.
        dims: what it is taken over.
        correction: subtracted from the number of values.
        keepdim: whether those dims stay, with size 1.
        axis: the mesh axis.

    Returns:
        The same on every rank, as its gradient must be.
    """
    return _spread(values, dims, (correction, False, axis), keepdim)


@sends(inside=lambda x, dims, *how: _moments_sent(x, dims, 2, how[-1]))
def sharded_std(
    values: torch.Tensor, dims: Sequence[int], correction: float, keepdim: bool, axis: str
) -> torch.Tensor:
    """Standard deviation over dims, of which one is sharded: the root of `sharded_var`."""
    return _spread(values, dims, (correction, True, axis), keepdim)


def _spread(
    values: torch.Tensor, dims: Sequence[int], how: tuple[float, bool, str], keepdim: bool
) -> torch.Tensor:
    result: torch.Tensor = _Spread.apply(values, tuple(dims), how)  # type: ignore[no-untyped-call]
    return result.squeeze(() if keepdim else tuple(dims))


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        how: tuple[float, tuple[int, ...], bool, str],
    ) -> torch.Tensor:
        eps, dims, is_centred, axis = how
        wide = values.to(_wide(values.dtype))
        if is_centred:
            mean, squares = _moments(wide, dims, axis)
        else:
            mean, squares = None, all_reduce_sum(wide.square().sum(dims, keepdim=True), axis)
        scale = (squares / _count(wide, dims, axis) + eps).rsqrt()
        ctx.save_for_backward(values, weight, bias, mean, scale)
        ctx.how = how
        result = _normalised(wide, mean, scale)
        result = result if weight is None else result * weight
        return (result if bias is None else result + bias).to(values.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        values, weight, bias, mean, scale = ctx.saved_tensors
        _, dims, is_centred, axis = ctx.how
        wide = gradient.to(scale.dtype)
        normalised = _normalised(values.to(scale.dtype), mean, scale)
        positions = tuple(range(values.ndim - len(dims)))
        of_weight = None if weight is None else (wide * normalised).sum(positions).to(weight.dtype)
        of_bias = None if bias is None else wide.sum(positions).to(bias.dtype)
        inner = wide if weight is None else wide * weight
        sums = [(inner * normalised).sum(dims, keepdim=True)]
        sums += [inner.sum(dims, keepdim=True)] if is_centred else []
        means = all_reduce_sum(torch.stack(sums), axis) / _count(values, dims, axis)
        found = inner - normalised * means[0]
        found = (found - means[1] if is_centred else found) * scale
        return found.to(values.dtype), of_weight, of_bias, None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, dims: tuple[int, ...], how: tuple[float, bool, str]
    ) -> torch.Tensor:
        correction, is_root, axis = how
        mean, squares = _moments(values.to(_wide(values.dtype)), dims, axis)
        ctx.divisor, ctx.is_root = _count(values, dims, axis) - correction, is_root
        result: torch.Tensor = squares / ctx.divisor
        result = result.sqrt() if is_root else result
        ctx.save_for_backward(values, mean, result)
        return result.to(values.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        values, mean, result = ctx.saved_tensors
        of_var = gradient.to(mean.dtype)
        if ctx.is_root:  # as torch has it, a deviation of zero has no gradient
            of_var = (of_var / (2 * result)).masked_fill(result == 0, 0.0)
        found = of_var * (values - mean) * (2 / ctx.divisor)
        return found.to(values.dtype), None, None


@one_operator
@operator_sends(inside=lambda wide, dims, axis: _moments_sent(wide, dims, 2, axis))
def _moments(
    wide: torch.Tensor, dims: tuple[int, ...], axis: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean, and sum of squared distances from it, from those of every rank.

    Source: Chan, Golub, LeVeque: Updating formulae and a pairwise algorithm for computing sample
    variances (1982), equations 2.1.
    """
    mean = wide.mean(dims, keepdim=True)
    squares = (wide - mean).square().sum(dims, keepdim=True)
    group, degree = current_mesh().group(axis), axis_degree(axis)
    if group is None:
        return mean, squares
    own = torch.stack((mean, squares))
    gathered = own.new_empty((degree * 2, *mean.shape))
    all_gather(gathered, own, group=group)
    means, parts = gathered[::2], gathered[1::2]
    mean = means.mean(0)
    count = math.prod(wide.shape[dim] for dim in dims)
    return mean, parts.sum(0) + count * (means - mean).square().sum(0)


def _normalised(
    values: torch.Tensor, mean: torch.Tensor | None, scale: torch.Tensor
) -> torch.Tensor:
    return (values if mean is None else values - mean) * scale


def _count(values: torch.Tensor, dims: Sequence[int], axis: str) -> int:
    """Number of values of a position on all ranks."""
    return math.prod(values.shape[dim] for dim in dims) * axis_degree(axis)


def _last(num_dims: int) -> tuple[int, ...]:
    return tuple(range(-num_dims, 0))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
