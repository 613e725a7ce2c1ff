"""Row shards of tensors over replicas: some rows of each, packed contiguously for a collective."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from merak.core.shards import RowShard, row_shard


def rows_of(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """A view of some rows of a tensor along its first dim; a scalar has one."""
    return (tensor if tensor.dim() else tensor.view(1))[start:stop]


def shard_rows(parameter: torch.Tensor, degree: int, index: int) -> RowShard:
    """The rows of a parameter in a replica's optimizer; their numbers differ by one at most."""
    return row_shard(tuple(parameter.shape), degree, index)


def pack(tensors: Sequence[torch.Tensor], degree: int, index: int) -> torch.Tensor:
    """Pack one replica's rows of some tensors contiguously, padded to the longest shard."""
    pieces = [_own_rows(tensor, degree, index).reshape(-1) for tensor in tensors]
    rest = longest_shard(tensors, degree) - sum(piece.numel() for piece in pieces)
    return torch.cat([*pieces, tensors[0].new_zeros(rest)] if rest else pieces)


def pack_all(tensors: Sequence[torch.Tensor], degree: int) -> torch.Tensor:
    """Pack the rows of every replica as `pack` does, one replica after the other."""
    length = longest_shard(tensors, degree)
    flat = tensors[0].new_zeros(degree * length)
    for index, part in enumerate(flat.chunk(degree)):
        start = 0
        for tensor in tensors:
            rows = _own_rows(tensor, degree, index)
            part[start : start + rows.numel()].view_as(rows).copy_(rows)
            start += rows.numel()
    return flat


def unpack(flat: torch.Tensor, into: Sequence[torch.Tensor], degree: int, index: int) -> None:
    """Write one replica's packed rows into the unsharded tensors."""
    start = 0
    for tensor in into:
        target = _own_rows(tensor, degree, index)
        target.copy_(flat[start : start + target.numel()].view_as(target))
        start += target.numel()


def _own_rows(tensor: torch.Tensor, degree: int, index: int) -> torch.Tensor:
    shard = shard_rows(tensor, degree, index)
    return rows_of(tensor.detach(), shard.start, shard.stop)


def longest_shard(tensors: Sequence[torch.Tensor], degree: int) -> int:
    """The number of elements of the largest shard of some tensors."""
    lengths = []
    for index in range(degree):
        shards = [(t, shard_rows(t, degree, index)) for t in tensors]
        lengths.append(
            sum((s.stop - s.start) * (t.numel() // max(_count(t), 1)) for t, s in shards)
        )
    return max(lengths)


def _count(tensor: torch.Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 1
