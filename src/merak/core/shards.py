"""How one rank's part of a parameter lies in the whole: cutting it out, putting it back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ParameterShard:
    """The layout of a parameter that is split over an axis of the mesh.

    A fused parameter (query, key and value in one matrix) is split part by part: every rank holds
    its share of each part, parts in their order.

    Args:
        dim: the dim that is split.
        parts: sizes along `dim` of the fused parts in the whole parameter, (n,) when not fused.
        degree: the number of ranks it is split over; divides every part that is split.
        whole: which parts every rank holds whole, by position.
    """

    dim: int
    parts: tuple[int, ...]
    degree: int
    whole: tuple[int, ...] = ()

    def sizes(self) -> tuple[int, ...]:
        """Sizes along `dim` of the parts on every rank."""
        parts = enumerate(self.parts)
        return tuple(size if i in self.whole else size // self.degree for i, size in parts)

    def ranges(self, index: int) -> tuple[tuple[int, int], ...]:
        """The (start, stop) intervals of the whole along `dim` that rank `index` holds."""
        starts = [sum(self.parts[:i]) for i in range(len(self.parts))]
        firsts = [0 if i in self.whole else index for i in range(len(self.parts))]
        return tuple(
            (start + first * size, start + (first + 1) * size)
            for start, first, size in zip(starts, firsts, self.sizes(), strict=True)
        )


def take(whole: torch.Tensor, shard: ParameterShard, index: int) -> torch.Tensor:
    """Rank `index`'s part of a whole parameter, as a new tensor."""
    pieces = [whole.narrow(shard.dim, a, b - a) for a, b in shard.ranges(index)]
    return torch.cat(pieces, dim=shard.dim)


def join(shares: Sequence[torch.Tensor], shard: ParameterShard) -> torch.Tensor:
    """The whole parameter from every rank's part, in rank order; the inverse of `take`."""
    split = [share.split(shard.sizes(), dim=shard.dim) for share in shares]
    pieces = [
        share[part]
        for part in range(len(shard.parts))
        for share in (split[:1] if part in shard.whole else split)
    ]
    return torch.cat(pieces, dim=shard.dim)


@dataclass(frozen=True, slots=True)
class RowShare:
    """The rows along its first dim of a rank's tensor that are stepped or stored here.

    Args:
        start: the first row.
        stop: the row after the last.
    """

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Stepped:
    """What an optimizer steps in the place of a parameter.

    Args:
        tensor: the parameter itself, a copy of it in another precision, or rows of either.
        rows: which rows of the parameter; None for all.
        is_master: whether its numbers are not the parameter's own memory.
    """

    tensor: torch.Tensor
    rows: RowShare | None = None
    is_master: bool = False
