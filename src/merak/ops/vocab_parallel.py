"""Vocab-parallel embedding and cross entropy: every rank of an axis holds a shard of the classes.

Rank r holds rows (or classes) r·n … (r + 1)·n − 1 of a size that is rounded up to n for each; what
lies beyond the size is padding: never looked up, and no class. No rank ever sees all logits.

Source: Megatron-LM (arXiv 1909.08053, section 3, "fuse the output of the parallel GEMM with the
cross entropy loss").
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional

from merak.core.mesh import current_mesh
from merak.core.shards import ParameterShard
from merak.ops.collectives import axis_degree, axis_rank
from merak.ops.linear import Sent, operator_sends, sends, with_gradient
from merak.ops.recording import one_operator

Layout = tuple[int, int, str]
"""(dim, whole size, axis): what is split, and over which axis; "" for none."""


def vocab_parallel_embedding(
    weight: torch.Tensor,
    indices: torch.Tensor,
    padding_idx: int,
    scale_grad_by_freq: bool,
    sparse: bool,
    size: int,
    axis: str,
) -> torch.Tensor:
    """Embedding look-up in the rank's rows, with zeros for other ranks' rows.

    Its arguments are those of torch's own operator and the layout, hence their number.

    Args:
        weight: the rank's rows, (rows of a rank, hidden).
        indices: the same on every rank, of any shape.
        padding_idx: the index whose row gets no gradient; −1 for none.
        scale_grad_by_freq: whether a row's gradient is divided by how often it is looked up.
        sparse: whether the weight's gradient is a sparse tensor.
        size: rows of the whole table.
        axis: name of the mesh axis that the rows are split over.

    Returns:
        (*indices, hidden): the rank's rows, zeros for those of others; their sum over the axis is
        the look-up.
    """
    start, stop = local_rows(size, axis)
    foreign = (indices < start) | (indices >= stop)
    # An index that no rank has must fail on every rank as it does in one process.
    nowhere = (indices < 0) | (indices >= size)
    local = (indices - start).masked_fill(foreign, 0).masked_fill(nowhere, weight.shape[0])
    own_padding = padding_idx - start if start <= padding_idx < stop else -1
    rows = torch.embedding(weight, local, own_padding, False, sparse)
    if scale_grad_by_freq:
        flat = indices.flatten()
        counts = flat.new_zeros(size).index_add(0, flat, torch.ones_like(flat))
        times = counts[indices].unsqueeze(-1)
        rows = with_gradient(rows, lambda gradient: gradient / times)
    return rows.masked_fill(foreign.unsqueeze(-1), 0.0)


def sums_of_positions(target: Any, smoothing: float, axis: str) -> Sent:
    """Collectives inside `vocab_parallel_cross_entropy`: maxima, then sums, of float32."""
    size = 4 * math.prod(target.shape)
    return ("all_reduce", size, axis), ("all_reduce", (3 if smoothing else 2) * size, axis)


@sends(inside=lambda _, target, *how: sums_of_positions(target, how[-2], how[-1][2]))
def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    layout: Layout,
) -> torch.Tensor:
    """Cross entropy of logits that are sharded over the classes.

    The ranks exchange three numbers for each position: the maximum of its logits, the sum of their
    exponentials, and the target's logit. Its backward exchanges nothing.

    Args:
        logits: the rank's classes along one dim, padding included.
        target: class indices, shaped like `logits` without that dim; the same on every rank.
        weight: a weight for each class of the whole, or None.
        reduction: 0 for none, 1 for the mean, 2 for the sum.
        ignore_index: the target of positions that do not count.
        label_smoothing: share of the target that goes to all classes alike.
        layout: how the classes are split.

    Returns:
        The loss, the same on every rank: of every position, or a scalar.
    """
    weights = weights_of(target, weight, ignore_index, compute_dtype(logits))
    smoothed = Smoothed(label_smoothing, weight, layout)
    losses: torch.Tensor = _CrossEntropy.apply(logits, target, weights, ignore_index, smoothed)  # type: ignore[no-untyped-call]
    return reduced(losses, weights, reduction).to(logits.dtype)


@dataclass(frozen=True, slots=True)
class Smoothed:
    """Label smoothing: the share of the loss that all classes have.

    Args:
        smoothing: of the target that goes to all classes alike.
        weight: of every class; None where all weigh 1.
        layout: how the classes are split.
    """

    smoothing: float
    weight: torch.Tensor | None
    layout: Layout

    def own_weight(self, like: torch.Tensor) -> torch.Tensor:
        """Weights of the rank's classes, to be multiplied with logits."""
        dim, size, axis = self.layout
        start, stop = local_rows(size, axis)
        shape = [1] * like.dim()
        shape[dim] = stop - start
        if self.weight is None:
            return like.new_ones(shape)
        return self.weight[start:stop].to(like.dtype).view(shape)

    def total_weight(self) -> torch.Tensor | float:
        """Sum of the weights of all classes."""
        return self.layout[1] if self.weight is None else self.weight.sum()


def weights_of(
    target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int, dtype: torch.dtype
) -> torch.Tensor:
    """What each position weighs: its class's weight, 0 where it is ignored.

    Args:
        target: class of each position.
        weight: of each class; None where all weigh 1.
        ignore_index: target of positions that do not count.
        dtype: of the result.
    """
    ignored = target == ignore_index
    weights = (~ignored).to(dtype)
    if weight is not None:
        weights = weights * weight.to(dtype)[target.masked_fill(ignored, 0)]
    return weights


def reduced(losses: torch.Tensor, weights: torch.Tensor, reduction: int) -> torch.Tensor:
    """Loss of all positions, by the number that torch gives a reduction."""
    if reduction == 1:
        return losses.sum() / weights.sum()
    return losses.sum() if reduction == 2 else losses


class Targets(NamedTuple):
    """Targets of positions.

    Attributes:
        local: indices among the rank's classes; 0 where another rank has it.
        foreign: where another rank has it.
        weights: of each position, from `weights_of`.
        ignored: positions that do not count.
    """

    local: torch.Tensor
    foreign: torch.Tensor
    weights: torch.Tensor
    ignored: torch.Tensor


def find_targets(
    target: torch.Tensor, weights: torch.Tensor, ignore_index: int, layout: Layout
) -> Targets:
    """Targets among the rank's classes.

    Args:
        target: class of each position; one that no rank has fails where it is looked up.
        weights: of each position.
        ignore_index: target of positions that do not count.
        layout: how the classes are split.
    """
    _, size, axis = layout
    ignored = target == ignore_index
    nowhere = ~ignored & ((target < 0) | (target >= size))
    local, foreign = local_of(target, *local_rows(size, axis))
    return Targets(local.masked_fill_(nowhere, size), foreign, weights, ignored)


def position_losses(
    own: torch.Tensor,
    targets: Targets,
    smoothed: Smoothed,
    overwrites: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Losses of positions: (1 − s)·w_t·(−log p_t) + s/C·Σ_c w_c·(−log p_c).

    Args:
        own: logits of the rank's classes, without padding, as precise as they are summed.
        targets: of the positions.
        smoothed: the smoothing.
        overwrites: whether the logits are not needed any more: they become the exponentials of
            what they are below the largest one.

    Returns:
        In the shape of the target, by one all-reduce of a maximum and one of all sums: the losses,
        the logarithm of the sum of all classes' exponentials, and the sum of those below the
        largest logit.
    """
    dim, size, axis = smoothed.layout
    local, foreign, weights, ignored = targets
    top = vocab_parallel_max(own, dim, axis)
    picked = pick(own, local.unsqueeze(dim), foreign.unsqueeze(dim), dim).squeeze(dim)
    shifted = torch.sub(own, top.unsqueeze(dim), out=own if overwrites else None)
    sums = [(picked - top).masked_fill(foreign, 0.0)]
    if smoothed.smoothing:
        sums.append((shifted * smoothed.own_weight(own)).sum(dim))
    sums.append(shifted.exp_().sum(dim))
    picked, *rest, total = all_reduce_sum(torch.stack(sums), axis).unbind()
    log_total = total.log()
    losses = (log_total - picked) * weights * (1 - smoothed.smoothing)
    if smoothed.smoothing:
        spread = smoothed.total_weight() * log_total - rest[0]
        losses = losses + (smoothed.smoothing / size) * spread
    return losses.masked_fill(ignored, 0.0), top + log_total, total


def position_gradients(
    gradient: torch.Tensor,
    own: torch.Tensor,
    targets: Targets,
    normaliser: torch.Tensor,
    smoothed: Smoothed,
    overwrites: bool = False,
) -> torch.Tensor:
    """Gradient of the rank's logits, without communication.

    Args:
        gradient: of each position's loss.
        own: as of `position_losses`, as the further arguments are.
        targets: of the positions.
        normaliser: what `position_losses` gives beside the losses.
        smoothed: the smoothing.
        overwrites: whether the logits are not needed any more.
    """
    down = normaliser.unsqueeze(smoothed.layout[0])
    shares = torch.sub(own, down, out=own if overwrites else None).exp_()
    return gradients_of_probabilities(gradient, shares, 1.0, targets, smoothed)


def gradients_of_probabilities(
    gradient: torch.Tensor,
    shares: torch.Tensor,
    total: torch.Tensor | float,
    targets: Targets,
    smoothed: Smoothed,
) -> torch.Tensor:
    """Gradient of the rank's logits, in place of their probabilities.

    Args:
        gradient: of each position's loss.
        shares: probabilities of the rank's classes, or what is as large as they are times `total`.
        total: of each position.
        targets: of the positions.
        smoothed: the smoothing.
    """
    dim, size, _ = smoothed.layout
    local, foreign, weights, ignored = targets
    gradient = gradient.masked_fill(ignored, 0.0)
    of_target = gradient * weights * (1 - smoothed.smoothing)
    of_all = gradient * (smoothed.smoothing / size)
    shares *= ((of_target + of_all * smoothed.total_weight()) / total).unsqueeze(dim)
    if shares.shape[dim]:
        taken = of_target.masked_fill(foreign, 0.0).neg().unsqueeze(dim)
        shares.scatter_add_(dim, local.unsqueeze(dim), taken)
    if smoothed.smoothing:
        shares -= of_all.unsqueeze(dim) * smoothed.own_weight(shares)
    return shares


class _CrossEntropy(torch.autograd.Function):
    """The loss of every position."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        weights: torch.Tensor,
        ignore_index: int,
        smoothed: Smoothed,
    ) -> torch.Tensor:
        """Losses, in the shape of the target."""
        targets = find_targets(target, weights, ignore_index, smoothed.layout)
        own = _classes_of(logits, smoothed.layout)
        losses, normaliser, _ = position_losses(own, targets, smoothed)
        ctx.save_for_backward(logits, normaliser, *targets)
        ctx.smoothed = smoothed
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        """Gradient of the local logits."""
        logits, normaliser, *targets = ctx.saved_tensors
        layout: Layout = ctx.smoothed.layout
        own = _classes_of(logits, layout)
        found = position_gradients(gradient, own, Targets(*targets), normaliser, ctx.smoothed)
        dim = layout[0]
        return padded_with(found.to(logits.dtype), dim, logits.shape[dim]), None, None, None, None


def _classes_of(logits: torch.Tensor, layout: Layout) -> torch.Tensor:
    start, stop = local_rows(*layout[1:])
    return local_classes(logits, layout[0], stop - start)


def local_rows(size: int, axis: str) -> tuple[int, int]:
    """Range of the rank's rows."""
    if not axis:
        return 0, size
    ((start, stop),) = ParameterShard(0, (size,), axis_degree(axis)).ranges(axis_rank(axis))
    return start, stop


def local_classes(logits: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    """Local logits without padding, in a dtype precise enough to be summed."""
    return logits.narrow(dim, 0, count).to(compute_dtype(logits))


def compute_dtype(logits: torch.Tensor) -> torch.dtype:
    """Type in which logits are summed."""
    return torch.promote_types(logits.dtype, torch.float32)


def _positions_sent(own: Any, dim: int, axis: str) -> Sent:
    size = math.prod(own.shape) // max(own.shape[dim], 1) * own.dtype.itemsize
    return (("all_reduce", size, axis),)


@one_operator
@operator_sends(inside=_positions_sent)
def vocab_parallel_max(own: torch.Tensor, dim: int, axis: str) -> torch.Tensor:
    """All-reduced maximum of every position's logits."""
    if own.shape[dim]:
        top = own.amax(dim)
    else:
        top = own.new_full((*own.shape[:dim], *own.shape[dim + 1 :]), -math.inf)
    group = current_mesh().group(axis) if axis else None
    if group is not None:
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
    return top


def local_of(target: torch.Tensor, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Local indices of targets, and a mask of those that other ranks hold."""
    foreign = (target < start) | (target >= stop)
    return (target - start).masked_fill(foreign, 0), foreign


def pick(
    values: torch.Tensor, local: torch.Tensor, foreign: torch.Tensor, dim: int
) -> torch.Tensor:
    """Local values by index; zero for classes of other ranks."""
    return values.gather(dim, local).masked_fill(foreign, 0.0)


def padded_with(own: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Local classes with zeros for padding."""
    missing = size - own.shape[dim]
    return functional.pad(own, [0, 0] * (own.dim() - dim - 1) + [0, missing]) if missing else own


@one_operator
@operator_sends(inside=lambda values, axis: (("all_reduce", values.num_bytes, axis),))
def all_reduce_sum(values: torch.Tensor, axis: str) -> torch.Tensor:
    """All-reduced sum, in place; without a backward."""
    group = current_mesh().group(axis) if axis else None
    if group is not None:
        dist.all_reduce(values, group=group)
    return values
