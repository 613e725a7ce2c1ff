"""Rows of experts that are exchanged: each rank computes its experts' rows of all ranks' tokens.

Every rank has other tokens, and sorts a row for each token and expert by expert. An all-to-all
brings each row to the rank that has its expert, another one brings the result back. No row is
dropped: how many there are is exchanged before, and read on the host once a layer.

Source: GShard (arXiv 2006.16668, section 3.2); MegaBlocks (arXiv 2211.15841), without capacities.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from merak.core.mesh import current_mesh
from merak.ops.collectives import all_gather, axis_degree, axis_rank
from merak.ops.linear import linear, operator_sends, sends
from merak.ops.recording import counted, one_operator


def _of_all(own: int, _: Any, counts: Any, *__: Any) -> int:
    return own * int(counts.shape[0])


_exchanges = sends("all_to_all", "all_to_all", size=_of_all)
"""Of rows that every rank has others of; counts have a row for every rank."""


@sends("all_gather", counts=True)
@one_operator
@operator_sends("all_gather", counts=True)
def expert_counts(offsets: torch.Tensor, axis: str) -> torch.Tensor:
    """Numbers of rows that every rank has for every expert.

    Args:
        offsets: (experts,), where every expert's rows end among this rank's own.
        axis: name of the mesh axis.

    Returns:
        (ranks, experts) int64, on the host.
    """
    group, shape = current_mesh().group(axis), (axis_degree(axis), offsets.shape[0])
    if group is None:  # of a mesh that is only pretended: the numbers are not known
        return torch.zeros(shape, dtype=torch.int64)
    own = offsets.long().diff(prepend=offsets.new_zeros(1, dtype=torch.int64))
    counts = own.new_empty(shape[0] * shape[1])
    all_gather(counts, own, group=group)
    return counts.view(shape).cpu()


@one_operator
def own_offsets(offsets: torch.Tensor, counts: torch.Tensor, axis: str) -> torch.Tensor:
    """End offsets of the rows of the rank's own experts, over the rows of all ranks.

    Args:
        offsets: (experts,), of which the result has type and device.
        counts: from `expert_counts`.
        axis: name of the mesh axis.

    Returns:
        (own experts,).
    """
    ends = _own(counts, axis).sum(0).cumsum(0)
    return ends.to(offsets.device, offsets.dtype, non_blocking=True)


@_exchanges
def to_experts(rows: torch.Tensor, counts: torch.Tensor, axis: str) -> torch.Tensor:
    """All-to-all of rows to the ranks that have their experts.

    Args:
        rows: (rows, …), sorted by expert; those behind the last expert's go nowhere.
        counts: from `expert_counts`.
        axis: name of the mesh axis.

    Returns:
        (rows of the own experts, …), sorted by expert, and each expert's by rank.
    """
    return _there(rows, counts, rows.shape[0], axis)


@_exchanges
def from_experts(
    rows: torch.Tensor, counts: torch.Tensor, num_rows: int, axis: str
) -> torch.Tensor:
    """All-to-all of experts' rows back to the ranks that they came from.

    Args:
        rows: (rows of the own experts, …), as `to_experts` gives them.
        counts: from `expert_counts`.
        num_rows: of the result; more than there are experts for are zeros.
        axis: name of the mesh axis.

    Returns:
        (num_rows, …), sorted by expert.
    """
    return _back(rows, counts, num_rows, axis)


@sends("all_gather", counts=True)
def batch_counts(batches: torch.Tensor, axis: str) -> torch.Tensor:
    """`expert_counts` of rows that lie in batches.

    Args:
        batches: (experts, rows of each, …).
        axis: name of the mesh axis.
    """
    num_experts, num_rows = batches.shape[:2]
    steps = torch.arange(1, num_experts + 1, device=batches.device)
    return expert_counts(steps * num_rows, axis)


@_exchanges
def batches_to_experts(batches: torch.Tensor, counts: torch.Tensor, axis: str) -> torch.Tensor:
    """`to_experts` of rows that lie in batches.

    Args:
        batches: (experts, rows of each, …).
        counts: from `batch_counts`.
        axis: name of the mesh axis.

    Returns:
        (own experts, rows of each that all ranks have, …).
    """
    rows = to_experts(batches.flatten(0, 1), counts, axis)
    return rows.view(counts.shape[1] // counts.shape[0], -1, *batches.shape[2:])


@_exchanges
def batches_from_experts(
    batches: torch.Tensor, counts: torch.Tensor, num_rows: int, axis: str
) -> torch.Tensor:
    """`from_experts` of rows that lie in batches.

    Args:
        batches: (own experts, rows of each that all ranks have, …).
        counts: from `batch_counts`.
        num_rows: of all experts that this rank gets back.
        axis: name of the mesh axis.

    Returns:
        (experts, rows of each, …).
    """
    rows = from_experts(batches.flatten(0, 1), counts, num_rows, axis)
    return rows.view(counts.shape[1], -1, *batches.shape[2:])


def own_experts(values: torch.Tensor, axis: str) -> torch.Tensor:
    """Rows of the rank's own experts, of a value with a row for each expert.

    Args:
        values: (experts, …), the same on every rank.
        axis: name of the mesh axis.

    Returns:
        (own experts, …).
    """
    num_own = values.shape[0] // axis_degree(axis)
    return values.narrow(0, axis_rank(axis) * num_own, num_own)


def value_of_each_row(
    values: torch.Tensor, counts: torch.Tensor, num_rows: int, axis: str
) -> torch.Tensor:
    """The value of its expert for each row of the own experts, such as biases.

    Args:
        values: (own experts, …).
        counts: from `expert_counts`.
        num_rows: of this rank before the exchange; as many are forecast behind it.
        axis: name of the mesh axis.

    Returns:
        (rows of the own experts, …).
    """
    return values.index_select(0, _expert_of_each_row(counts, num_rows, axis, values.device))


def num_own_rows(counts: torch.Tensor, axis: str) -> int:
    """Number of rows that the ranks have for this rank's experts."""
    return int(_own(counts, axis).sum())


@counted(num_own_rows)
def _expert_of_each_row(
    counts: torch.Tensor, num_rows: int, axis: str, device: torch.device
) -> torch.Tensor:
    """Number of its expert, among the rank's own, for each row of these."""
    if current_mesh().group(axis) is None:
        return torch.zeros(num_rows, dtype=torch.int64, device=device)
    rows = _own(counts, axis).sum(0)
    return _repeat_each(torch.arange(rows.shape[0], device=device), rows)


@counted(num_own_rows)
@operator_sends("all_to_all", size=_of_all)
def _to_experts(rows: torch.Tensor, counts: torch.Tensor, num_rows: int, axis: str) -> torch.Tensor:
    group = current_mesh().group(axis)
    if group is None:  # of a mesh that is only pretended: as many rows as in the mean
        return rows.clone()
    sent, received = _sizes(counts, axis)
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    own = rows[: sum(sent)].contiguous()
    dist.all_to_all_single(arrived, own, received, sent, group=group)
    return arrived.index_select(0, _by_expert(counts, axis, rows.device))


@one_operator
@operator_sends("all_to_all", size=_of_all)
def _from_experts(
    rows: torch.Tensor, counts: torch.Tensor, num_rows: int, axis: str
) -> torch.Tensor:
    group = current_mesh().group(axis)
    if group is None:
        return rows.new_zeros((num_rows, *rows.shape[1:]))
    sent, received = _sizes(counts, axis)
    by_rank = torch.empty_like(rows, memory_format=torch.contiguous_format)
    by_rank.index_copy_(0, _by_expert(counts, axis, rows.device), rows)
    returned = rows.new_zeros((num_rows, *rows.shape[1:]))
    dist.all_to_all_single(returned[: sum(sent)], by_rank, sent, received, group=group)
    return returned


_there = linear(_to_experts, _from_experts)
_back = linear(_from_experts, _to_experts)


def _own(counts: torch.Tensor, axis: str) -> torch.Tensor:
    """(ranks, own experts): rows that the ranks have for this rank's experts."""
    num_own = counts.shape[1] // counts.shape[0]
    return counts.narrow(1, axis_rank(axis) * num_own, num_own)


def _sizes(counts: torch.Tensor, axis: str) -> tuple[list[int], list[int]]:
    """Numbers of rows that this rank sends to every rank, and gets from it."""
    sent = counts[axis_rank(axis)].view(counts.shape[0], -1).sum(1)
    return sent.tolist(), _own(counts, axis).sum(1).tolist()


def _by_expert(counts: torch.Tensor, axis: str, device: torch.device) -> torch.Tensor:
    """The order by expert of rows that have come sorted by rank, and each rank's by expert."""
    own = _own(counts, axis)
    experts = torch.arange(own.shape[1], device=device).repeat(own.shape[0])
    return _repeat_each(experts, own.flatten()).argsort(stable=True)


def _repeat_each(values: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
    """Values, each as often as a tensor on the host says; the host does not wait for a GPU."""
    on_device = times.to(values.device, non_blocking=True)
    return values.repeat_interleave(on_device, 0, output_size=int(times.sum()))
