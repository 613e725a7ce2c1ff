"""Shards of parameters: the rows and columns of a parameter that each rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ParameterShard:
    """Layout of a parameter that is sharded over an axis of the mesh.

    A fused parameter (query, key and value in one matrix) is split part by part: every rank holds
    its shard of each part, parts in their order. Where the degree does not divide the only part of
    a parameter (a vocabulary), the sizes of shards are rounded up, and the last ranks' are padded
    with zeros. A parameter with an owner, as of an expert that is a module of its own, is whole on
    one rank and empty on the others. With copies, consecutive ranks hold the same shard, as of
    the keys of fewer heads than ranks.

    Args:
        dim: the dim that is split.
        parts: sizes along `dim` of the fused parts in the whole parameter, (n,) when not fused.
        degree: the number of ranks it is split over; divides every part that is split, unless
            there is only one.
        whole: indices of the parts that are replicated.
        owner: the rank that has everything; None where each has a shard.
        copies: how many consecutive ranks hold the same shard; divides the degree.
    """

    dim: int
    parts: tuple[int, ...]
    degree: int
    whole: tuple[int, ...] = ()
    owner: int | None = None
    copies: int = 1

    @property
    def num_shards(self) -> int:
        """Number of different shards of the parameter."""
        return self.degree // self.copies

    @property
    def is_even(self) -> bool:
        """Whether it is one row of equal shards, a different one on each rank."""
        splits = self.owner is None and self.copies == 1 and not self.whole
        return splits and len(self.parts) == 1 and self.parts[0] % self.degree == 0

    def sizes(self, index: int) -> tuple[int, ...]:
        """Return the sizes along `dim` of the fused parts that rank `index` holds."""
        if self.owner is not None:
            return self.parts if index == self.owner else (0,) * len(self.parts)
        parts = enumerate(self.parts)
        return tuple(
            size if i in self.whole else shard_size(size, self.num_shards) for i, size in parts
        )

    def ranges(self, index: int) -> tuple[tuple[int, int], ...]:
        """Return the (start, stop) intervals of the whole along `dim` that rank `index` holds."""
        starts = [sum(self.parts[:i]) for i in range(len(self.parts))]
        is_first = self.owner is not None
        own = index // self.copies
        firsts = [0 if is_first or i in self.whole else own for i in range(len(self.parts))]
        end = sum(self.parts)
        return tuple(
            (min(start + first * size, end), min(start + (first + 1) * size, end))
            for start, first, size in zip(starts, firsts, self.sizes(index), strict=True)
        )


def shard_size(size: int, degree: int) -> int:
    """Return the size of a shard, rounded up."""
    return -(-size // degree)


def take(whole: torch.Tensor, shard: ParameterShard, index: int) -> torch.Tensor:
    """Cut rank `index`'s shard out of a whole parameter, as a new tensor."""
    pieces = [whole.narrow(shard.dim, a, b - a) for a, b in shard.ranges(index)]
    return fill_up(torch.cat(pieces, dim=shard.dim), shard, index)


def fill_up(part: torch.Tensor, shard: ParameterShard, index: int) -> torch.Tensor:
    """Pad rank `index`'s shard to its size; returns it as it is where nothing is missing."""
    missing = sum(shard.sizes(index)) - part.shape[shard.dim]
    if not missing:
        return part
    shape = (*part.shape[: shard.dim], missing, *part.shape[shard.dim + 1 :])
    return torch.cat([part, part.new_zeros(shape)], dim=shard.dim)


def join(shards: Sequence[torch.Tensor], shard: ParameterShard) -> torch.Tensor:
    """Concatenate the shards of all ranks, in rank order, to the whole; the inverse of `take`."""
    split = [own.split(shard.sizes(i), dim=shard.dim) for i, own in enumerate(shards)]
    split = split[:: shard.copies]
    pieces = [
        own[part]
        for part in range(len(shard.parts))
        for own in (split[:1] if part in shard.whole else split)
    ]
    joined, size = torch.cat(pieces, dim=shard.dim), sum(shard.parts)
    if joined.shape[shard.dim] == size:
        return joined
    return joined.narrow(shard.dim, 0, size).contiguous()


def take_all(whole: torch.Tensor, shard: ParameterShard) -> torch.Tensor:
    """Cut the shards of all ranks out of a whole tensor, with one kernel at most where it can.

    Args:
        whole: is shared with the result where its shards lie one after another.
        shard: how it is split.

    Returns:
        (rank, *shape of a shard), contiguous.
    """
    if not shard.is_even:
        return torch.stack([take(whole, shard, rank) for rank in range(shard.degree)])
    parts = (shard.degree, shard.parts[0] // shard.degree)
    pieces: torch.Tensor = whole.unflatten(shard.dim, parts)
    return pieces.movedim(shard.dim, 0).contiguous()


def join_all(shards: torch.Tensor, shard: ParameterShard) -> torch.Tensor:
    """Join the shards of all ranks to the whole, the inverse of `take_all`.

    Args:
        shards: (rank, *shape of a shard); shared with the result where that needs no copy.
        shard: how the whole is split.
    """
    if not shard.is_even:
        return join(shards.unbind(0), shard)
    return shards.movedim(0, shard.dim).flatten(shard.dim, shard.dim + 1)


@dataclass(frozen=True, slots=True)
class RowShard:
    """The rows along its first dim of a rank's tensor that are stepped or stored here.

    Args:
        start: the first row.
        stop: the row after the last.
    """

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class OptimizerTensor:
    """The tensor that an optimizer steps in place of a parameter.

    Args:
        tensor: the parameter itself, a copy of it in another precision, or rows of either.
        rows: which rows of the parameter; None for all.
        is_master: whether it is more precise than the parameter, and so saved beside it.
        is_copy: whether its numbers are not the parameter's own memory.
    """

    tensor: torch.Tensor
    rows: RowShard | None = None
    is_master: bool = False
    is_copy: bool = False


def row_shard(shape: tuple[int, ...], degree: int, index: int) -> RowShard:
    """The rows of a tensor of some shape that one of some replicas steps: torch's chunk."""
    count = shape[0] if shape else 1
    each = shard_size(count, degree)
    return RowShard(min(each * index, count), min(each * (index + 1), count))
