"""Collectives in traced graphs: plain functions, each with its own backward.

They come in pairs of what a tensor is on the ranks of an axis (replicated, a partial sum, a slice)
and what it becomes; backward does the opposite for the gradient. Forward and adjoint are plain
functions of tensors, and what each sends stands beside its name. Every transfer goes through
`_all_reduce`, `_all_gather` or `_reduce_scatter`: nothing is synchronised with the host, and a
version that starts early and is waited for later has these places to change.

Source: Megatron-LM (arXiv 1909.08053, section 3, the operators f and g); Korthikanti et al.
(arXiv 2205.05198, section 4.2.2, the operators g and its conjugate).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import unwrap
from typing import Any

import torch
import torch.distributed as dist

from merak.core.mesh import current_mesh
from merak.core.shards import ParameterShard, join_all, take, take_all
from merak.ops.linear import linear, operator_sends, sends, with_gradient
from merak.ops.recording import one_operator


@sends(back="all_reduce")
def copy_to(tensor: torch.Tensor, axis: str) -> torch.Tensor:
    """Identity whose gradient is all-reduced: a replicated tensor enters sharded work.

    Args:
        tensor: the same on every rank of the axis.
        axis: name of the mesh axis.

    Returns:
        The tensor; its gradient, of which each rank has a part, is all-reduced over the axis, that
        of a vector, as of a norm or a bias, in float32 at least.
    """
    return with_gradient(tensor, partial(_sum_of_copies, axis=axis))


@sends(back="all_reduce")
def copy_parts_to(
    tensor: torch.Tensor, dim: int, sizes: tuple[int, ...], whole: tuple[int, ...], axis: str
) -> torch.Tensor:
    """Identity whose gradient's replicated parts are all-reduced.

    Args:
        tensor: fused parts side by side.
        dim: the dim along which they lie.
        sizes: their sizes on this rank.
        whole: which of them are the same on every rank of the axis.
        axis: name of the mesh axis.

    Returns:
        The tensor; the gradients of the replicated parts are all-reduced over the axis.
    """
    return with_gradient(tensor, partial(_sum_parts, dim=dim, sizes=sizes, whole=whole, axis=axis))


def _of_copies(own: int, _: Any, copies: int, *__: Any) -> int:
    return own * (copies - 1) // copies


@sends(back="all_reduce", size=_of_copies)
def copy_shared_to(tensor: torch.Tensor, copies: int, axis: str) -> torch.Tensor:
    """Identity whose gradient is summed over the ranks that hold the same shard.

    Args:
        tensor: the same on so many neighbouring ranks of the axis.
        copies: how many.
        axis: name of the mesh axis.
    """
    return with_gradient(tensor, partial(_sum_shared, copies=copies, axis=axis))


@sends("all_reduce")
def reduce_from(tensor: torch.Tensor, axis: str) -> torch.Tensor:
    """All-reduce of partial sums, whose gradient passes as it is.

    Args:
        tensor: one summand per rank.
        axis: name of the mesh axis.

    Returns:
        The sum, on every rank; its gradient goes to every summand as it is.
    """
    return _reduced(tensor, axis)


@sends("all_gather")
def gather_from(tensor: torch.Tensor, dim: int, parts: tuple[int, ...], axis: str) -> torch.Tensor:
    """All-gather of slices, whose backward keeps the rank's slice of the gradient.

    Args:
        tensor: one slice per rank.
        dim: the dim that is split, counted from the front.
        parts: sizes of the whole tensor's fused parts along `dim`, each split by itself.
        axis: name of the mesh axis.

    Returns:
        The whole tensor, on every rank; backward keeps the rank's own slice of the gradient.
    """
    return _gathered(tensor, dim, parts, axis)


@sends("all_gather")
def gather_shared(
    tensor: torch.Tensor, dim: int, parts: tuple[int, ...], copies: int, axis: str
) -> torch.Tensor:
    """All-gather of slices that are each on several ranks, which share out its gradient.

    Args:
        tensor: one slice for each group of consecutive ranks.
        dim: the dim that is split, counted from the front.
        parts: sizes of the whole tensor's fused parts along `dim`, each split by itself.
        copies: ranks in a group.
        axis: name of the mesh axis.

    Returns:
        The whole tensor, on every rank; backward keeps the slice of the gradient, divided among
        the ranks that hold it.
    """
    shared = with_gradient(tensor, lambda gradient: gradient / copies)
    return _gathered(shared, dim, parts, axis, copies)


@sends("all_gather")
def gather_parts(
    tensor: torch.Tensor, dim: int, parts: tuple[int, ...], whole: tuple[int, ...], axis: str
) -> torch.Tensor:
    """All-gather of fused parts of which some are replicated, which share out their gradient.

    Args:
        tensor: the parts side by side: slices of those that are split, and all of the others.
        dim: the dim along which they lie, counted from the front.
        parts: their sizes in the whole tensor.
        whole: which of them are the same on every rank of the axis.
        axis: name of the mesh axis.

    Returns:
        The whole tensor, on every rank; backward keeps the rank's slices of the gradient, and
        divides that of the replicated parts among the ranks.
    """
    degree = axis_degree(axis)
    sizes = tuple(n if i in whole else n // degree for i, n in enumerate(parts))

    def divided(gradient: torch.Tensor) -> torch.Tensor:
        pieces = enumerate(gradient.split(sizes, dim))
        return torch.cat([piece / degree if i in whole else piece for i, piece in pieces], dim)

    return _gathered(with_gradient(tensor, divided), dim, parts, axis, 1, whole)


@sends()
def own_share(
    tensor: torch.Tensor,
    dim: int,
    parts: tuple[int, ...],
    copies: int,
    kept: int,
    axis: str,
) -> torch.Tensor:
    """A rank's share of a slice that it holds with others, which has a slice for fewer of them.

    Args:
        tensor: one slice for each group of consecutive ranks.
        dim: the dim that is split, counted from the front.
        parts: sizes of the whole tensor's fused parts along `dim`, each split by itself.
        copies: ranks in a group.
        kept: ranks in a group that then have the same share.
        axis: name of the mesh axis.

    Returns:
        The share; what backward gives is the rank's part of the slice's gradient.
    """
    local = tuple(size * copies // axis_degree(axis) for size in parts)
    return take(tensor, ParameterShard(dim, local, copies, copies=kept), axis_rank(axis) % copies)


@sends(back="all_gather")
def slice_to(tensor: torch.Tensor, dim: int, parts: tuple[int, ...], axis: str) -> torch.Tensor:
    """Local slice of a replicated tensor, whose backward is an all-gather.

    Args:
        tensor: the same on every rank of the axis.
        dim: the dim to split, counted from the front.
        parts: sizes of the fused parts along `dim`, each split by itself.
        axis: name of the mesh axis.

    Returns:
        The slice; backward puts the slices of the gradient together.
    """
    return _sliced(tensor, dim, parts, axis)


@sends("reduce_scatter", "all_gather")
def reduce_scatter_to(
    tensor: torch.Tensor, dim: int, parts: tuple[int, ...], axis: str
) -> torch.Tensor:
    """Reduce-scatter of partial sums, whose backward is an all-gather.

    Args:
        tensor: one summand per rank.
        dim: the dim to split, counted from the front.
        parts: sizes of the fused parts along `dim`, each split by itself.
        axis: name of the mesh axis.

    Returns:
        The slice; backward puts the slices of the gradient together, for every summand.
    """
    return _scattered(tensor, dim, parts, axis)


@sends("all_gather", "reduce_scatter", is_repeated=True)
def gather_with_partial_grad(
    tensor: torch.Tensor, dim: int, parts: tuple[int, ...], axis: str
) -> torch.Tensor:
    """All-gather of slices for sharded work, whose backward is a reduce-scatter.

    Args:
        tensor: one slice per rank.
        dim: the dim that is split, counted from the front.
        parts: sizes of the whole tensor's fused parts along `dim`, each split by itself.
        axis: name of the mesh axis.

    Returns:
        The whole tensor, on every rank; its gradient, of which each rank has a part, is all-reduced
        over the axis, and backward keeps the rank's own slice.
    """
    return _gathered_for_split(tensor, dim, parts, axis)


@sends()
def local_slice(
    tensor: torch.Tensor, dim: int, parts: tuple[int, ...], axis: str, copies: int = 1
) -> torch.Tensor:
    """Local slice of a tensor that has entered sharded work by `copy_to`.

    Args:
        tensor: the same on every rank of the axis; each rank makes a part of its gradient.
        dim: the dim to split, counted from the front.
        parts: sizes of the fused parts along `dim`, each split by itself.
        axis: name of the mesh axis.
        copies: how many consecutive ranks take the same slice.

    Returns:
        The slice; what backward gives is the rank's part of the gradient, nothing is sent.
    """
    return _local_slice(tensor, dim, parts, axis, copies)


@sends()
def leave_partial_grad(tensor: torch.Tensor, axis: str) -> torch.Tensor:
    """Identity whose gradient is divided among the ranks: the inverse of `copy_to`.

    Args:
        tensor: the same on every rank of the axis; each rank makes a part of its gradient.
        axis: name of the mesh axis.

    Returns:
        The tensor; its gradient, which every rank has whole, is divided among the ranks.
    """
    return with_gradient(tensor, partial(_divided, axis=axis))


@sends()
def replicate_to_partial(tensor: torch.Tensor, axis: str) -> torch.Tensor:
    """Partial sum of a replicated tensor: an equal summand on every rank.

    Args:
        tensor: the same on every rank of the axis.
        axis: name of the mesh axis.

    Returns:
        The rank's summand; the sum's gradient is the tensor's.
    """
    return _summand(tensor, axis)


@sends("all_gather", "reduce_scatter")
def gather_replicas(tensor: torch.Tensor, dim: int, parts: tuple[int, ...]) -> torch.Tensor:
    """All-gather of what replicas have, in their order, whose backward sums their gradients.

    Each replica's loss reads all of it, so that the sum of these losses has that gradient.

    Args:
        tensor: another one on every replica, of the same shape.
        dim: 0, along which they lie behind each other.
        parts: the size of all together.

    Returns:
        The tensors of all replicas.
    """
    return _gathered_for_all(tensor, dim, parts, "dp")


@sends("all_reduce", "all_reduce")
def sum_replicas(tensor: torch.Tensor) -> torch.Tensor:
    """All-reduce of what replicas have, whose backward sums their gradients likewise.

    Args:
        tensor: a summand of every replica.

    Returns:
        The sum, which each replica's loss reads.
    """
    return _summed_for_all(tensor, "dp")


Started = tuple[torch.Tensor, "dist.Work | None"]
"""An all-reduce that has been started: what will be the sum, and what to wait for."""


def begin_all_reduce(tensor: torch.Tensor, axis: str) -> Started:
    """Start the all-reduce of a tensor, which stays as it is; see `end_all_reduce`."""
    total = _copy_to_sum(tensor)
    return total, start_all_reduce(total, axis)


def end_all_reduce(started: Started) -> torch.Tensor:
    """The sum of an all-reduce, which is waited for."""
    total, work = started
    if work is not None:
        work.wait()
    return total


def start_all_reduce(tensor: torch.Tensor, axis: str) -> dist.Work | None:
    """Asynchronous all-reduce of a contiguous tensor over an axis, in place.

    Returns:
        What to wait for before the tensor is read; None where the axis has one rank.
    """
    group = current_mesh().group(axis)
    return None if group is None else dist.all_reduce(tensor, group=group, async_op=True)


def of_equal_ranks(function: Callable[..., Any], args: Any, kwargs: Any) -> torch.Tensor:
    """What a collective gives where all ranks have the same tensors; nothing is sent.

    Args:
        function: as a recorder is given it: an all-reduce, an all-gather or a reduce-scatter.
        args: its arguments.
        kwargs: its arguments by name.
    """
    tensor, *_ = args
    if function is ALL_REDUCE:
        reduced: torch.Tensor = tensor * axis_degree(args[1])
        return reduced
    dim, parts, axis = args[1:4]
    shard = ParameterShard(dim, parts, axis_degree(axis))
    if function is unwrap(_reduce_scatter):
        return take(tensor, shard, 0) * shard.degree
    assert function is unwrap(_all_gather) and not (args[4:] or kwargs)
    return join_all(torch.stack([tensor] * shard.degree), shard)


def axis_degree(axis: str) -> int:
    """Number of ranks along a mesh axis."""
    degree: int = getattr(current_mesh(), axis)
    return degree


def axis_rank(axis: str) -> int:
    """Position of this rank along a mesh axis."""
    rank: int = getattr(current_mesh(), f"{axis}_rank")
    return rank


def _sum_of_copies(gradient: torch.Tensor, axis: str) -> torch.Tensor:
    """Sum of the ranks' gradients; of vectors, whose bytes are few, without a rounding a rank."""
    if gradient.dim() > 1:
        return _all_reduce(gradient, axis)
    wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    return _all_reduce(wide, axis).to(gradient.dtype)


def _sum_parts(
    gradient: torch.Tensor, dim: int, sizes: tuple[int, ...], whole: tuple[int, ...], axis: str
) -> torch.Tensor:
    pieces = list(gradient.split(sizes, dim))
    together = _sum_of_copies(torch.cat([pieces[i] for i in whole], dim), axis)
    reduced = together.split([sizes[i] for i in whole], dim)
    for i, piece in zip(whole, reduced, strict=True):
        pieces[i] = piece
    return torch.cat(pieces, dim)


@one_operator
@operator_sends("all_reduce", size=_of_copies)
def _sum_shared(gradient: torch.Tensor, copies: int, axis: str) -> torch.Tensor:
    """Sum over the ranks of one group: each sums a piece, and sends it to the others.

    Two all-to-alls in which other groups get nothing, since a communicator for every group would
    have to be made by all ranks of a job.
    """
    group = current_mesh().group(axis)
    if group is None:  # a mesh that is only pretended; yet it is another tensor, as of others
        return _copy_to_sum(gradient)
    rank, size = axis_rank(axis), -(-gradient.numel() // copies)
    partners = [int(rank // copies == other // copies) for other in range(axis_degree(axis))]
    pieces = gradient.new_zeros(copies, size)
    pieces.view(-1)[: gradient.numel()] = gradient.flatten()
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces, partners, partners, group=group)
    summed = received.sum(0, keepdim=True).expand(copies, size).contiguous()
    dist.all_to_all_single(received, summed, partners, partners, group=group)
    return received.view(-1)[: gradient.numel()].view(gradient.shape)


def _same(gradient: torch.Tensor, axis: str) -> torch.Tensor:
    return gradient


def _divided(tensor: torch.Tensor, axis: str) -> torch.Tensor:
    return tensor / axis_degree(axis)


def _copy_to_sum(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


@one_operator
@operator_sends("all_reduce")
def _all_reduce(tensor: torch.Tensor, axis: str) -> torch.Tensor:
    total = _copy_to_sum(tensor)
    group = current_mesh().group(axis)
    if group is not None:
        dist.all_reduce(total, group=group)
    return total


@one_operator
@operator_sends("all_gather")
def _all_gather(
    tensor: torch.Tensor,
    dim: int,
    parts: tuple[int, ...],
    axis: str,
    copies: int = 1,
    whole: tuple[int, ...] = (),
) -> torch.Tensor:
    degree = axis_degree(axis)
    if degree == 1:
        return tensor.clone()
    group = current_mesh().group(axis)
    shards = tensor.new_empty((degree, *tensor.shape))
    if group is not None:  # a mesh that is only pretended has none
        all_gather(shards.flatten(0, 1), tensor.contiguous(), group=group)
    return join_all(shards, ParameterShard(dim, parts, degree, whole, copies=copies))


@one_operator
@operator_sends("all_gather")
def _gather_for_split(
    tensor: torch.Tensor, dim: int, parts: tuple[int, ...], axis: str
) -> torch.Tensor:
    return _all_gather(tensor, dim, parts, axis)


ALL_REDUCE = unwrap(_all_reduce)
"""All-reduce, as a recorder sees it: `begin_all_reduce` and `end_all_reduce` in one."""

GATHERED_AGAIN = frozenset({unwrap(_gather_for_split)})
"""Of the operators that a recorder sees, those whose result is gathered again for the backward."""


@one_operator
@operator_sends("reduce_scatter")
def _reduce_scatter(
    tensor: torch.Tensor, dim: int, parts: tuple[int, ...], axis: str
) -> torch.Tensor:
    shard = ParameterShard(dim, parts, axis_degree(axis))
    if shard.degree == 1:
        return tensor.clone(memory_format=torch.contiguous_format)
    shards = take_all(tensor, shard)
    own = torch.empty_like(shards[0])
    group = current_mesh().group(axis)
    if group is not None:  # a mesh that is only pretended has none
        reduce_scatter(own, shards.flatten(0, 1), group=group)
    return own


def _local_slice(
    tensor: torch.Tensor,
    dim: int,
    parts: tuple[int, ...],
    axis: str,
    copies: int = 1,
    whole: tuple[int, ...] = (),
) -> torch.Tensor:
    shard = ParameterShard(dim, parts, axis_degree(axis), whole, copies=copies)
    return take(tensor, shard, axis_rank(axis))


def _local_copy(tensor: torch.Tensor, dim: int, parts: tuple[int, ...], axis: str) -> torch.Tensor:
    return _local_slice(tensor, dim, parts, axis).contiguous()


_reduced = linear(_all_reduce, _same)
_summand = linear(_divided, _same)
_gathered = linear(_all_gather, _local_slice)
_sliced = linear(_local_copy, _all_gather)
_scattered = linear(_reduce_scatter, _all_gather)
_gathered_for_all = linear(_all_gather, _reduce_scatter)
_summed_for_all = linear(_all_reduce, _all_reduce)
_gathered_for_split = linear(_gather_for_split, _reduce_scatter)


# Of flat tensors, by the names that this torch has for them


def all_gather(output_tensor: torch.Tensor, input_tensor: torch.Tensor, **kwargs: Any) -> Any:
    """Gather the tensors of all ranks, one after the other."""
    collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return collective(output_tensor, input_tensor, **kwargs)


def reduce_scatter(output_tensor: torch.Tensor, input_tensor: torch.Tensor, **kwargs: Any) -> Any:
    """Reduce the tensors of all ranks, and receive this one's shard."""
    collective = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return collective(output_tensor, input_tensor, **kwargs)
