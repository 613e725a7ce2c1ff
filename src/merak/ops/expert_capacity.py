"""Rows of experts in places of a fixed number: each expert has as many of each rank.

An expert computes at most so many rows of a rank's microbatch, its capacity; places without a row
are zeros. Rows that find no place are dropped: they give zeros, and get no gradient. The first rows
of an expert have places, in the order of their tokens. All sizes follow from shapes, so nothing is
counted before rows are exchanged, and nothing is read on the host.

Source: GShard (arXiv 2006.16668, section 2.2); Switch Transformers (arXiv 2101.03961, equation 3).
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from merak.core.mesh import current_mesh
from merak.ops.linear import linear, operator_sends, sends
from merak.ops.recording import one_operator

_exchanges = sends("all_to_all", "all_to_all", size=lambda own, *args: own * args[-2])
"""Of places that every rank has others of; args end with the number of ranks, and the axis."""


def expert_capacity(num_rows: int, num_experts: int, factor: float) -> int:
    """Rows of a rank's microbatch that an expert computes at most.

    Args:
        num_rows: of all experts: tokens × the experts that each is sent to.
        num_experts: of the layer.
        factor: 1 for as many as each expert has where tokens are spread evenly.
    """
    return min(num_rows, math.ceil(factor * num_rows / num_experts))


@_exchanges
def to_places(
    rows: torch.Tensor, offsets: torch.Tensor, size: int, num_rows: int, degree: int, axis: str
) -> torch.Tensor:
    """All-to-all of rows, padded to a capacity, to the ranks that have their experts.

    Args:
        rows: (rows, …), sorted by expert; those behind the last expert's go nowhere.
        offsets: (experts,), where every expert's rows end.
        size: places that an expert has for rows of one rank.
        num_rows: how many rows there are.
        degree: the number of ranks.
        axis: name of the mesh axis.

    Returns:
        (own experts × ranks × size, …), sorted by expert, and each expert's by rank.
    """
    return _there(rows, offsets, size, num_rows, degree, axis)


@_exchanges
def from_places(
    places: torch.Tensor, offsets: torch.Tensor, size: int, num_rows: int, degree: int, axis: str
) -> torch.Tensor:
    """All-to-all of experts' rows back to the ranks that they came from.

    Args:
        places: as `to_places` gives them.
        offsets: (experts,), where every expert's rows end.
        size: places that an expert has for rows of one rank.
        num_rows: of the result.
        degree: the number of ranks.
        axis: name of the mesh axis.

    Returns:
        (num_rows, …), sorted by expert; zeros where a row has found no place.
    """
    return _back(places, offsets, size, num_rows, degree, axis)


@_exchanges
def batches_to_places(batches: torch.Tensor, degree: int, axis: str) -> torch.Tensor:
    """All-to-all of rows that the model has laid out in batches of a fixed size.

    Args:
        batches: (experts, rows of each, …).
        degree: the number of ranks.
        axis: name of the mesh axis.

    Returns:
        (own experts, rows of each that all ranks have, …).
    """
    return _batches_there(batches, degree, axis)


@_exchanges
def batches_from_places(places: torch.Tensor, degree: int, axis: str) -> torch.Tensor:
    """All-to-all of such batches back to the ranks that they came from.

    Args:
        places: as `batches_to_places` gives them.
        degree: the number of ranks.
        axis: name of the mesh axis.

    Returns:
        (experts, rows of each, …).
    """
    return _batches_back(places, degree, axis)


def ends_of_places(num_experts: int, num_places: int) -> torch.Tensor:
    """Where the places of each expert end, for operators that read them on the host.

    Args:
        num_experts: of this rank.
        num_places: of each of them.

    Returns:
        (own experts,), on the host.
    """
    return torch.arange(1, num_experts + 1, device="cpu") * num_places


def value_of_each_place(values: torch.Tensor, num_places: int) -> torch.Tensor:
    """The value of its expert for each place, such as biases.

    Args:
        values: (own experts, …).
        num_places: of each expert.

    Returns:
        (own experts × num_places, …).
    """
    every = values.unsqueeze(1).expand(-1, num_places, *values.shape[1:])
    return every.reshape(-1, *values.shape[1:])


def _to_places(
    rows: torch.Tensor, offsets: torch.Tensor, size: int, num_rows: int, degree: int, axis: str
) -> torch.Tensor:
    starts, ends = _bounds(offsets)
    place = starts.unsqueeze(1) + torch.arange(size, device=rows.device)
    is_empty = (place >= ends.unsqueeze(1)).flatten()
    taken = rows.index_select(0, place.flatten().clamp(max=num_rows - 1))
    taken = taken.masked_fill(_as_column(is_empty, taken), 0)
    batches = taken.view(-1, size, *rows.shape[1:])
    return _to_ranks(batches, degree, axis).flatten(0, 1)


def _from_places(
    places: torch.Tensor, offsets: torch.Tensor, size: int, num_rows: int, degree: int, axis: str
) -> torch.Tensor:
    own = places.view(offsets.shape[0] // degree, degree * size, *places.shape[1:])
    batches = _from_ranks(own, degree, axis)
    starts, ends = _bounds(offsets)
    row = torch.arange(num_rows, device=places.device)
    expert = torch.searchsorted(ends, row, right=True)
    is_behind, expert = expert == len(ends), expert.clamp(max=len(ends) - 1)
    place = row - starts.index_select(0, expert)
    is_dropped = is_behind | (place >= size)
    found = batches.flatten(0, 1).index_select(0, (expert * size + place.clamp(max=size - 1)))
    return found.masked_fill(_as_column(is_dropped, found), 0)


def _bounds(offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the rows of each expert start and end."""
    ends = offsets.long()
    return torch.cat([ends.new_zeros(1), ends[:-1]]), ends


def _as_column(mask: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return mask.view(-1, *(1 for _ in rows.shape[1:]))


def _to_ranks(batches: torch.Tensor, degree: int, axis: str) -> torch.Tensor:
    """(experts, size, …) to (own experts, ranks × size, …)."""
    if degree == 1:
        return batches
    size, rest = batches.shape[1], batches.shape[2:]
    by_rank = _exchanged(batches, degree, axis).view(degree, -1, size, *rest)
    return by_rank.transpose(0, 1).reshape(-1, degree * size, *rest)


def _from_ranks(places: torch.Tensor, degree: int, axis: str) -> torch.Tensor:
    """(own experts, ranks × size, …) to (experts, size, …)."""
    if degree == 1:
        return places
    size, rest = places.shape[1] // degree, places.shape[2:]
    by_expert = places.reshape(-1, degree, size, *rest)
    return _exchanged(by_expert.transpose(0, 1), degree, axis).view(-1, size, *rest)


@one_operator
@operator_sends("all_to_all", size=lambda own, _, degree, axis: own * degree)
def _exchanged(tensor: torch.Tensor, degree: int, axis: str) -> torch.Tensor:
    """Equal parts of the first dim, each from another rank; one's own where a mesh is pretended.

    The degree is an argument because the price of the operator is asked for without a mesh.
    """
    sent = tensor.clone(memory_format=torch.contiguous_format)
    group = current_mesh().group(axis)
    if group is None:
        return sent
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received


_there = linear(_to_places, _from_places)
_back = linear(_from_places, _to_places)
_batches_there = linear(_to_ranks, _from_ranks)
_batches_back = linear(_from_ranks, _to_ranks)
