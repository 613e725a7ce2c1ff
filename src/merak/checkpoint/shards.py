"""Shards of tensors as boxes of the whole, and which rank writes each box of a checkpoint.

A rank's shard of a fused parameter is several boxes of the whole, which no DTensor placement
describes; torch's distributed checkpoint (DCP) gets the boxes themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from merak.core.shards import ParameterShard, RowShard
from merak.graph.weights.holders import full_shape


@dataclass(frozen=True, slots=True)
class TensorShard:
    """A rank's shard of a tensor: boxes of the whole.

    Args:
        size: the shape of the whole.
        boxes: offsets of each piece in the whole, and the piece.
    """

    size: tuple[int, ...]
    boxes: tuple[tuple[tuple[int, ...], torch.Tensor], ...]

    def chunks(self) -> list[ChunkStorageMetadata]:
        """The boxes as DCP's chunks."""
        return [
            ChunkStorageMetadata(torch.Size(offsets), piece.size()) for offsets, piece in self.boxes
        ]


def shard_of(tensor: torch.Tensor, shard: ParameterShard | None, index: int) -> TensorShard:
    """A rank's tensor as a shard of the whole; its pieces are views.

    Args:
        tensor: what the rank holds.
        shard: the layout of the shards; None where the rank holds the whole.
        index: number of the shard.
    """
    data = tensor.detach()
    origin = (0,) * data.dim()
    if shard is None:
        return TensorShard(tuple(data.shape), ((origin, data),))
    boxes, start = [], 0
    for begin, end in shard.ranges(index):
        if begin == end:
            continue  # nothing but padding
        offsets = (*origin[: shard.dim], begin, *origin[shard.dim + 1 :])
        boxes.append((offsets, data.narrow(shard.dim, start, end - begin)))
        start += end - begin
    return TensorShard(full_shape(data, shard), tuple(boxes))


def row_shard_of(
    tensor: torch.Tensor,
    rows: RowShard,
    like: torch.Tensor,
    shard: ParameterShard | None,
    index: int,
) -> TensorShard:
    """Row shard of a rank's tensor, for a checkpoint; its pieces are views.

    Args:
        tensor: the rows.
        rows: first and last of them.
        like: the rank's whole tensor, for its shape.
        shard: as in `shard_of`.
        index: as in `shard_of`.
    """
    data = tensor.detach()
    if not like.dim():
        return shard_of(data.view(()), None, 0)
    # Offsets of the pieces of the rank's own tensor, from one that costs nothing.
    whole = shard_of(torch.empty(like.shape, device="meta"), shard, index)
    dim = 0 if shard is None else shard.dim
    boxes, start = [], 0
    for offsets, piece in whole.boxes:
        end = start + piece.shape[dim]
        if dim:
            boxes.append(((rows.start, *offsets[1:]), data.narrow(dim, start, end - start)))
        elif (first := max(rows.start, start)) < (stop := min(rows.stop, end)):
            place = (offsets[0] + first - start, *offsets[1:])
            boxes.append((place, data[first - rows.start : stop - rows.start]))
        start = end
    return TensorShard(whole.size, tuple(boxes))


Shards = dict[str, TensorShard]
"""Shards of a rank by key."""

Box = tuple[str, tuple[int, ...]]
"""Key of a tensor, and offset of a box in the whole."""


def box_sizes(shards: Shards) -> dict[Box, int]:
    """Return the sizes in bytes of a rank's boxes."""
    return {
        (key, offset): piece.nbytes
        for key, shard in shards.items()
        for offset, piece in shard.boxes
    }


def assign_boxes(held: Sequence[Mapping[Box, int]]) -> list[frozenset[Box]]:
    """Assign every box to one of the ranks that hold it, so that all write about as much.

    Args:
        held: sizes in bytes of the boxes of every rank; the same argument on every rank.
    """
    holders: dict[Box, list[int]] = {}
    for rank, sizes in enumerate(held):
        for box in sizes:
            holders.setdefault(box, []).append(rank)
    assigned: list[set[Box]] = [set() for _ in held]
    load = [0] * len(held)
    # Boxes with the fewest choices first, then the largest.
    for box in sorted(holders, key=lambda b: (len(holders[b]), -held[holders[b][0]][b], b)):
        rank = min(holders[box], key=lambda r: (load[r], r))
        assigned[rank].add(box)
        load[rank] += held[rank][box]
    return [frozenset(boxes) for boxes in assigned]


def only_boxes(shards: Shards, boxes: frozenset[Box]) -> Shards:
    """Keep some boxes of a rank's shards."""
    kept: Shards = {}
    for key, shard in shards.items():
        if own := tuple(box for box in shard.boxes if (key, box[0]) in boxes):
            kept[key] = replace(shard, boxes=own)
    return kept
