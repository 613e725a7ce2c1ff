"""Row shards of tensors over replicas: some rows of each, packed contiguously for a collective.

A replica's rows are torch's chunk of the first dim (`merak.core.shards.row_shard`). In a packed
tensor each has as many places as the largest shard, so all replicas' lie at equal distances, and
tensors are packed and unpacked for all replicas at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch

from merak.core.shards import RowShard, row_shard, shard_size


def rows_of(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """A view of some rows of a tensor along its first dim; a scalar has one."""
    return (tensor if tensor.dim() else tensor.view(1))[start:stop]


def shard_rows(parameter: torch.Tensor, degree: int, index: int) -> RowShard:
    """The rows of a parameter in a replica's optimizer."""
    return row_shard(tuple(parameter.shape), degree, index)


def packed_length(tensors: Sequence[torch.Tensor], degree: int) -> int:
    """The number of elements of one replica's packed rows of some tensors."""
    return sum(_width(tensor, degree) for tensor in tensors)


def pack(tensors: Sequence[torch.Tensor], degree: int, index: int) -> torch.Tensor:
    """Pack one replica's rows of some tensors."""
    flat = tensors[0].new_zeros(packed_length(tensors, degree))
    pieces = unpack(flat, tensors, degree, index)
    own = [(tensor, shard_rows(tensor, degree, index)) for tensor in tensors]
    rows = [rows_of(tensor, shard.start, shard.stop) for tensor, shard in own]
    _copy(zip(pieces, rows, strict=True))
    return flat


def pack_all(
    tensors: Sequence[torch.Tensor], degree: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Pack the rows of every replica as `pack` does, one replica after the other.

    Args:
        tensors: of one type.
        degree: the number of replicas.
        dtype: of the result; None for the tensors' own.
    """
    is_even = all(_whole(tensor).shape[0] % degree == 0 for tensor in tensors)
    make = tensors[0].new_empty if is_even else tensors[0].new_zeros
    flat = make(degree * packed_length(tensors, degree), dtype=dtype or tensors[0].dtype)
    _copy(_all_rows(flat, tensors, degree))
    return flat


def unpack_all(flat: torch.Tensor, into: Sequence[torch.Tensor], degree: int) -> None:
    """Write every replica's packed rows into the unsharded tensors."""
    _copy((rows, piece) for piece, rows in _all_rows(flat, into, degree))


def unpack(
    flat: torch.Tensor, like: Sequence[torch.Tensor], degree: int, index: int
) -> list[torch.Tensor]:
    """One replica's rows of some tensors, as views of its packed ones.

    Args:
        flat: what `pack` has given, or a collective of such.
        like: tensors of their shapes.
        degree: the number of replicas.
        index: the replica.
    """
    pieces, start = [], 0
    for tensor in like:
        own = shard_rows(tensor, degree, index)
        shape = (own.stop - own.start, *tensor.shape[1:])
        pieces.append(flat[start : start + math.prod(shape)].view(shape))
        start += _width(tensor, degree)
    return pieces


def _copy(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second of each pair into the first."""
    found = [(into.detach(), source.detach()) for into, source in pairs]
    if found:
        torch._foreach_copy_([into for into, _ in found], [source for _, source in found])


def _all_rows(
    flat: torch.Tensor, tensors: Sequence[torch.Tensor], degree: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Packed rows of all replicas beside rows of the tensors, as views of equal shapes."""
    by_replica, start = flat.view(degree, -1), 0
    for tensor in map(_whole, tensors):
        width, each = _width(tensor, degree), shard_size(tensor.shape[0], degree)
        if not width:
            continue
        columns, num_full = by_replica[:, start : start + width], tensor.shape[0] // each
        whole, rest = tensor[: num_full * each], tensor[num_full * each :]
        yield (
            columns[:num_full].unflatten(1, (each, *tensor.shape[1:])),
            whole.unflatten(0, (num_full, each)),
        )
        if rest.shape[0]:
            yield columns[num_full][: rest.numel()].view(rest.shape), rest
        start += width


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() else tensor.view(1)


def _width(tensor: torch.Tensor, degree: int) -> int:
    """Places of a replica's rows of a tensor: as many elements as the largest shard has."""
    count = tensor.shape[0] if tensor.dim() else 1
    return shard_size(count, degree) * math.prod(tensor.shape[1:])
