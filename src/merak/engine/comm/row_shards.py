"""Shares of tensors among replicas: some rows of each, laid in a row to be sent together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from merak.core.shards import RowShard, row_shard


def rows_of(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Some rows of a tensor along its first dim, a view; a scalar has one."""
    return (tensor if tensor.dim() else tensor.view(1))[start:stop]


def shard_rows(parameter: torch.Tensor, degree: int, index: int) -> RowShard:
    """The rows of a parameter that one of some replicas steps; their numbers differ by one."""
    return row_shard(tuple(parameter.shape), degree, index)


def pack(tensors: Sequence[torch.Tensor], degree: int, index: int) -> torch.Tensor:
    """One replica's rows of some tensors in a row, filled up to the longest of all replicas'."""
    shares = [shard_rows(tensor, degree, index) for tensor in tensors]
    pieces = [
        rows_of(tensor.detach(), share.start, share.stop).reshape(-1)
        for tensor, share in zip(tensors, shares, strict=True)
    ]
    length = sum(piece.numel() for piece in pieces)
    rest = longest_shard(tensors, degree) - length
    return torch.cat([*pieces, tensors[0].new_zeros(rest)] if rest else pieces)


def pack_all(tensors: Sequence[torch.Tensor], degree: int) -> torch.Tensor:
    """Every replica's rows of some tensors, as `pack` lays them, one replica after the other."""
    length = longest_shard(tensors, degree)
    flat = tensors[0].new_zeros(degree * length)
    for index, part in enumerate(flat.chunk(degree)):
        start = 0
        for tensor in tensors:
            share = shard_rows(tensor, degree, index)
            rows = rows_of(tensor.detach(), share.start, share.stop)
            part[start : start + rows.numel()].view_as(rows).copy_(rows)
            start += rows.numel()
    return flat


def unpack(flat: torch.Tensor, into: Sequence[torch.Tensor], degree: int, index: int) -> None:
    """Write one replica's rows, as `pack` has laid them, into the whole tensors."""
    start = 0
    for tensor in into:
        share = shard_rows(tensor, degree, index)
        target = rows_of(tensor.detach(), share.start, share.stop)
        target.copy_(flat[start : start + target.numel()].view_as(target))
        start += target.numel()


def longest_shard(tensors: Sequence[torch.Tensor], degree: int) -> int:
    """Elements of the largest share of some tensors."""
    lengths = []
    for index in range(degree):
        shares = [(t, shard_rows(t, degree, index)) for t in tensors]
        lengths.append(
            sum((s.stop - s.start) * (t.numel() // max(_count(t), 1)) for t, s in shares)
        )
    return max(lengths)


def _count(tensor: torch.Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 1
