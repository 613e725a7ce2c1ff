"""Vocab-parallel sums, gathers and log-probabilities of logits sharded over the classes.

What losses written by hand are made of. Classes beyond the size are padding, as in
`merak.ops.vocab_parallel`: they are left out, and get no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from merak.ops.linear import Sent, sends
from merak.ops.vocab_parallel import (
    Layout,
    all_reduce_sum,
    local_classes,
    local_of,
    local_rows,
    padded_with,
    pick,
    vocab_parallel_max,
)


def vocab_parallel_sum(
    values: torch.Tensor,
    dims: Sequence[int],
    keepdim: bool,
    dtype: torch.dtype | None,
    layout: Layout,
) -> torch.Tensor:
    """Partial sum over dims, among them that of the classes.

    Args:
        values: the rank's classes along one dim, padding included.
        dims: what is summed over.
        keepdim: whether those dims stay, with size 1.
        dtype: of the sum; None for that of the values.
        layout: how the classes are split.

    Returns:
        The rank's summand.
    """
    start, stop = local_rows(layout[1], layout[2])
    own = values.narrow(layout[0], 0, stop - start)
    return own.sum(tuple(dims), keepdim=keepdim, dtype=dtype)


def vocab_parallel_gather(
    values: torch.Tensor, index: torch.Tensor, layout: Layout
) -> torch.Tensor:
    """Gather of classes by index, as a partial sum.

    Args:
        values: the rank's classes along one dim, padding included.
        index: classes of the whole; the same on every rank.
        layout: how the classes are split.

    Returns:
        What the rank has of it, zeros for what others have: a summand.
    """
    dim, size, axis = layout
    local, foreign = local_of(index, *local_rows(size, axis))
    nowhere = (index < 0) | (index >= size)  # fails, as it does in one process
    return pick(values, local.masked_fill(nowhere, size), foreign, dim)


def vocab_parallel_nll(
    log_probabilities: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    layout: Layout,
) -> torch.Tensor:
    """Negative log-likelihood of targets, as a partial sum.

    Args:
        log_probabilities: of the rank's classes along one dim, padding included.
        target: class indices, shaped like them without that dim; the same on every rank.
        weight: a weight for each class of the whole, or None.
        reduction: 0 for none, 1 for the mean, 2 for the sum.
        ignore_index: the target of positions that do not count.
        layout: how the classes are split.

    Returns:
        The rank's summand of the loss.
    """
    dim = layout[0]
    ignored = target == ignore_index
    known = target.masked_fill(ignored, 0)
    weights = (~ignored).to(log_probabilities.dtype)
    if weight is not None:
        weights = weights * weight.to(weights.dtype)[known]
    picked = vocab_parallel_gather(log_probabilities, known.unsqueeze(dim), layout).squeeze(dim)
    losses = -(picked * weights).masked_fill(ignored, 0.0)
    if reduction == 0:
        return losses
    return losses.sum() / weights.sum() if reduction == 1 else losses.sum()


def _maxima_and_sums(values: Any, *how: Any) -> Sent:
    """What is sent for the normaliser of each position, of float32."""
    dim, _, axis = how[-1]
    size = 4 * math.prod(values.shape) // values.shape[dim]
    return (("all_reduce", size, axis),) * 2


@sends(inside=_maxima_and_sums)
def vocab_parallel_log_softmax(
    logits: torch.Tensor, dtype: torch.dtype | None, layout: Layout
) -> torch.Tensor:
    """Log-probabilities of the local classes.

    Args:
        logits: the rank's classes along one dim, padding included.
        dtype: of the result; None for that of the logits.
        layout: how the classes are split.

    Returns:
        Shaped like the logits; zeros for padding. Its backward sums a number for each position.
    """
    converted = logits if dtype is None else logits.to(dtype)
    result: torch.Tensor = _LogSoftmax.apply(converted, layout)  # type: ignore[no-untyped-call]
    return result


@sends(inside=_maxima_and_sums)
def vocab_parallel_logsumexp(logits: torch.Tensor, keepdim: bool, layout: Layout) -> torch.Tensor:
    """Logarithm of the summed exponentials of all classes.

    Args:
        logits: the rank's classes along one dim, padding included.
        keepdim: whether that dim stays, with size 1.
        layout: how the classes are split.

    Returns:
        The same on every rank.
    """
    result: torch.Tensor = _LogSumExp.apply(logits, layout)  # type: ignore[no-untyped-call]
    return result.unsqueeze(layout[0]) if keepdim else result


@sends(inside=_maxima_and_sums)
def vocab_parallel_argmax(values: torch.Tensor, keepdim: bool, layout: Layout) -> torch.Tensor:
    """Class with the largest value; the first of several.

    Args:
        values: the rank's classes along one dim, padding included.
        keepdim: whether that dim stays, with size 1.
        layout: how the classes are split.

    Returns:
        The same on every rank.
    """
    dim, size, axis = layout
    start, stop = local_rows(size, axis)
    own = values.detach().narrow(dim, 0, stop - start)
    top = vocab_parallel_max(own, dim, axis)
    first = torch.full_like(top, size, dtype=torch.int64)
    if stop > start:
        largest, place = own.max(dim)
        first = (start + place).where(largest == top, first)
    # The smallest by the largest of the negated, shaped as one class of each position.
    found = -vocab_parallel_max(-first.unsqueeze(dim), dim, axis)
    return found.unsqueeze(dim) if keepdim else found


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Of the own classes; (…, own classes), padded as the logits are."""
        dim, size, axis = layout
        start, stop = local_rows(size, axis)
        own = local_classes(logits, dim, stop - start)
        top = vocab_parallel_max(own, dim, axis)
        result = own - _normaliser(own, top, dim, axis).unsqueeze(dim)
        result = padded_with(result.to(logits.dtype), dim, logits.shape[dim])
        ctx.save_for_backward(result)
        ctx.layout = layout
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (result,) = ctx.saved_tensors
        dim, size, axis = ctx.layout
        start, stop = local_rows(size, axis)
        given = local_classes(gradient, dim, stop - start)
        total = all_reduce_sum(given.sum(dim), axis).unsqueeze(dim)
        found = given - local_classes(result, dim, stop - start).exp() * total
        return padded_with(found.to(gradient.dtype), dim, gradient.shape[dim]), None


class _LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, layout: Layout) -> torch.Tensor:
        dim, size, axis = layout
        start, stop = local_rows(size, axis)
        own = local_classes(logits, dim, stop - start)
        top = vocab_parallel_max(own, dim, axis)
        top = top.masked_fill(top.isinf(), 0.0)  # as torch: inf - inf would be NaN
        normaliser = _normaliser(own, top, dim, axis)
        ctx.save_for_backward(logits, normaliser)
        ctx.layout = layout
        return normaliser.to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, normaliser = ctx.saved_tensors
        dim, size, axis = ctx.layout
        start, stop = local_rows(size, axis)
        own = local_classes(logits, dim, stop - start)
        found = (own - normaliser.unsqueeze(dim)).exp_() * gradient.unsqueeze(dim)
        return padded_with(found.to(logits.dtype), dim, logits.shape[dim]), None


def _normaliser(own: torch.Tensor, top: torch.Tensor, dim: int, axis: str) -> torch.Tensor:
    """Logarithm of the summed exponentials of all ranks' classes; `top` keeps exp in range."""
    return top + all_reduce_sum((own - top.unsqueeze(dim)).exp_().sum(dim), axis).log()
