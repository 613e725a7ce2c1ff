"""Operators over ranks that share tokens: exchanges of shards, and losses over all tokens.

Source: DeepSpeed-Ulysses (arXiv 2309.14509, section 3): between tokens and heads, an all-to-all.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from merak.core.mesh import current_mesh
from merak.core.shards import ParameterShard, join_all, take_all
from merak.ops.chunked_loss import ChunkedHead, chunked_cross_entropy, sent_by_chunks
from merak.ops.collectives import axis_degree
from merak.ops.linear import Sent, linear, operator_sends, sends
from merak.ops.recording import one_operator
from merak.ops.vocab_parallel import Layout, sums_of_positions, vocab_parallel_cross_entropy

Side = tuple[int, tuple[int, ...]]
"""(dim, parts): what is split, as of `merak.ops.collectives.gather_from`."""


def _held_by_all(own: int, shard: Any, held: Side, *_: Any) -> int:
    """Bytes of the whole of a tensor that all ranks hold shards of."""
    dim, parts = held
    return own * sum(parts) // int(shard.shape[dim])


@sends("all_to_all", "all_to_all", size=_held_by_all)
def exchange_shards(tensor: torch.Tensor, held: Side, wanted: Side, axis: str) -> torch.Tensor:
    """All-to-all from shards along one dim to shards along another; its backward is the reverse.

    Args:
        tensor: the rank's shard.
        held: how it is split.
        wanted: how it is to be split.
        axis: name of the mesh axis.

    Returns:
        The shard along the other dim.
    """
    return _exchanged(tensor, held, wanted, axis)


def _exchanged_back(gradient: torch.Tensor, held: Side, wanted: Side, axis: str) -> torch.Tensor:
    return _all_to_all(gradient, wanted, held, axis)


@one_operator
@operator_sends("all_to_all", size=_held_by_all)
def _all_to_all(tensor: torch.Tensor, held: Side, wanted: Side, axis: str) -> torch.Tensor:
    degree = axis_degree(axis)
    if degree == 1:
        return tensor.clone()
    mine, theirs = ParameterShard(*held, degree), ParameterShard(*wanted, degree)
    sent = take_all(tensor, theirs)
    received = torch.empty_like(sent)
    group = current_mesh().group(axis)
    if group is not None:  # a mesh that is only pretended has none
        dist.all_to_all_single(received, sent, group=group)
    return join_all(received, mine)


_exchanged = linear(_all_to_all, _exchanged_back)


def _number_of_labels(*args: Any) -> Sent:
    return (("all_reduce", 8, args[-1]),)


@sends(inside=_number_of_labels)
def token_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    axis: str,
) -> torch.Tensor:
    """The rank's summand of a mean cross entropy over the tokens of all ranks.

    Args:
        logits: of the rank's tokens, (tokens, classes) or (samples, classes, tokens).
        target: classes of the rank's tokens, or their probabilities.
        weight: of each class; None where all weigh 1.
        ignore_index: the target of tokens that do not count.
        label_smoothing: share of the target that goes to all classes alike.
        axis: name of the mesh axis.

    Returns:
        A summand, a scalar.
    """
    total = functional.cross_entropy(
        logits,
        target,
        weight,
        ignore_index=ignore_index,
        reduction="sum",
        label_smoothing=label_smoothing,
    )
    return total / _weight_of(target, logits.shape[1], weight, ignore_index, axis).to(total.dtype)


def _both_sent(_: Any, target: Any, *how: Any) -> Sent:
    return *_number_of_labels(*how), *sums_of_positions(target, how[-3], how[-2][2])


@sends(inside=_both_sent)
def token_vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    layout: Layout,
    axis: str,
) -> torch.Tensor:
    """`token_cross_entropy` of logits whose classes are split over another axis.

    Args:
        logits: the rank's classes of its tokens.
        target: as of `token_cross_entropy`.
        weight: as of `token_cross_entropy`.
        ignore_index: as of `token_cross_entropy`.
        label_smoothing: as of `token_cross_entropy`.
        layout: how the classes are split, as of `vocab_parallel_cross_entropy`.
        axis: name of the mesh axis of the tokens.
    """
    total = vocab_parallel_cross_entropy(
        logits, target, weight, 2, ignore_index, label_smoothing, layout
    )
    return total / _weight_of(target, layout[1], weight, ignore_index, axis).to(total.dtype)


def _number_and_chunks(*args: Any) -> Sent:
    *tensors, head, axis = args
    return *_number_of_labels(axis), *sent_by_chunks(*tensors, *head)


@sends(inside=_number_and_chunks)
def chunked_token_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    head: ChunkedHead,
    axis: str,
) -> torch.Tensor:
    """`token_cross_entropy` of a head's logits that are made a chunk of rows at a time.

    Args:
        hidden: as of `chunked_cross_entropy`, as the further ones are.
        weight: of the rank's classes.
        bias: of these classes.
        target: classes of the rank's tokens.
        class_weight: of each class.
        head: the rest.
        axis: name of the mesh axis of the tokens.
    """
    head = ChunkedHead(*head)
    total = chunked_cross_entropy(hidden, weight, bias, target, class_weight, 2, head)
    num_classes = head.layout[1]
    count = _weight_of(target, num_classes, class_weight, head.ignore_index, axis)
    return total / count.to(total.dtype)


@sends(inside=_number_of_labels)
def token_nll(
    log_probabilities: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    axis: str,
) -> torch.Tensor:
    """The rank's summand of a mean negative log likelihood over the tokens of all ranks.

    Arguments are those of `token_cross_entropy`.
    """
    total = functional.nll_loss(
        log_probabilities, target, weight, ignore_index=ignore_index, reduction="sum"
    )
    count = _weight_of(target, log_probabilities.shape[1], weight, ignore_index, axis)
    return total / count.to(total.dtype)


@one_operator
@operator_sends(inside=_number_of_labels)
@torch.no_grad()
def _weight_of(
    target: torch.Tensor,
    num_classes: int,
    weight: torch.Tensor | None,
    ignore_index: int,
    axis: str,
) -> torch.Tensor:
    """What a mean over the tokens of all ranks divides by."""
    if target.is_floating_point():
        count = torch.tensor(target.numel() // num_classes, device=target.device)
    else:
        counted = target != ignore_index
        each = 1 if weight is None else weight[target.masked_fill(~counted, 0)]
        count = (each * counted).sum()
    group = current_mesh().group(axis)
    if group is not None:
        dist.all_reduce(count, group=group)
    return count


def inverse_permutation(permutation: torch.Tensor) -> torch.Tensor:
    """The permutation that undoes another.

    Args:
        permutation: of 0 … n − 1, (n,).
    """
    places = torch.arange(permutation.numel(), device=permutation.device, dtype=permutation.dtype)
    return torch.empty_like(permutation).scatter_(0, permutation, places)
