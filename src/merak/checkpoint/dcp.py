"""Tensors in parts, through torch's distributed checkpoint: written as they lie, read as needed.

A rank's part of a fused parameter is several boxes of the whole, which DTensor cannot say; the
planners below give torch the boxes themselves, and it works out which saved boxes make them up.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from merak.core.health.status import during, waiting_for_all
from merak.core.shards import ParameterShard, RowShard
from merak.graph.weights.holders import full_shape
from merak.graph.weights.rank_agreement import is_distributed


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank has of a tensor.

    Args:
        size: the shape of the whole.
        boxes: where each piece begins in the whole, and the piece.
    """

    size: tuple[int, ...]
    boxes: tuple[tuple[tuple[int, ...], torch.Tensor], ...]

    def chunks(self) -> list[ChunkStorageMetadata]:
        """The boxes in torch's words."""
        return [
            ChunkStorageMetadata(torch.Size(offsets), piece.size()) for offsets, piece in self.boxes
        ]


def part_of(tensor: torch.Tensor, shard: ParameterShard | None, index: int) -> Part:
    """A rank's tensor as a part of the whole; its pieces are views.

    Args:
        tensor: what the rank holds.
        shard: how the whole is split; None where the rank holds it all.
        index: which part the rank holds.
    """
    data = tensor.detach()
    origin = (0,) * data.dim()
    if shard is None:
        return Part(tuple(data.shape), ((origin, data),))
    boxes, start = [], 0
    for begin, end in shard.ranges(index):
        if begin == end:
            continue  # nothing but padding
        offsets = (*origin[: shard.dim], begin, *origin[shard.dim + 1 :])
        boxes.append((offsets, data.narrow(shard.dim, start, end - begin)))
        start += end - begin
    return Part(full_shape(data, shard), tuple(boxes))


def part_of_rows(
    tensor: torch.Tensor,
    rows: RowShard,
    like: torch.Tensor,
    shard: ParameterShard | None,
    index: int,
) -> Part:
    """Some rows of a rank's tensor as a part of the whole; its pieces are views.

    Args:
        tensor: the rows.
        rows: which.
        like: the rank's whole tensor, for its shape.
        shard: as in `part_of`.
        index: as in `part_of`.
    """
    data = tensor.detach()
    if not like.dim():
        return part_of(data.view(()), None, 0)
    # Where the pieces of the rank's whole tensor lie, from one that costs nothing.
    whole = part_of(torch.empty(like.shape, device="meta"), shard, index)
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
    return Part(whole.size, tuple(boxes))


State = dict[str, Any]
"""Key → a `Part`, or any other object, which is pickled whole."""


def save_parts(folder: Path, state: State) -> None:
    """Write what all ranks have; each names what it has, equal boxes are written once."""
    with _alone_is_fine(), waiting_for_all("parts to be written by"):
        save(dict(state), storage_writer=_Writer(folder), planner=_SavePlanner())


def load_parts(folder: Path, state: State) -> None:
    """Read into the pieces of the parts of `state`, and replace its other objects."""
    planner = _LoadPlanner(state)
    with _alone_is_fine(), waiting_for_all("parts to be read by"):
        load({}, storage_reader=_Reader(folder), planner=planner)


def read_index(folder: Path) -> Metadata | None:
    """What a folder holds; None where no complete checkpoint was written."""
    if not is_complete(folder):
        return None
    return FileSystemReader(folder).read_metadata()


def is_complete(folder: Path) -> bool:
    """Whether all of a checkpoint was written: its index is written last."""
    index = folder / ".metadata"
    return index.is_file() and index.stat().st_size > 0


def shape_of(index: Metadata, key: str) -> tuple[int, ...] | None:
    """The whole shape of a tensor of a checkpoint; None where it has none of that key."""
    entry = index.state_dict_metadata.get(key)
    return tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None


@contextmanager
def _alone_is_fine() -> Iterator[None]:
    """A single process is no mistake that would need torch's warning."""
    with warnings.catch_warnings():
        if not is_distributed():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


class _Writer(FileSystemWriter):
    """Says when this rank writes; the rest of a save, ranks wait for one another."""

    @during("writing parameters and optimizer")
    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        return super().write_data(*args, **kwargs)

    @during("writing the index of parameters and optimizer")
    def finish(self, *args: Any, **kwargs: Any) -> None:
        super().finish(*args, **kwargs)


class _Reader(FileSystemReader):
    """Says when this rank reads; the rest of a load, ranks wait for one another."""

    @during("reading parameters and optimizer")
    def read_data(self, *args: Any, **kwargs: Any) -> Any:
        return super().read_data(*args, **kwargs)

    @during("reading the index of parameters and optimizer")
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return super().read_metadata(*args, **kwargs)


class _SavePlanner(DefaultSavePlanner):
    """Writes the boxes of parts."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def create_local_plan(self) -> SavePlan:
        """What this rank has to write."""
        items = [item for key, value in self.state_dict.items() for item in _write(key, value)]
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The piece that an item of the plan writes."""
        value = self.state_dict[index.fqn]
        if not isinstance(value, Part):
            return value
        return next(piece for offsets, piece in value.boxes if offsets == tuple(index.offset or ()))


class _LoadPlanner(DefaultLoadPlanner):
    """Reads the boxes of parts."""

    def __init__(self, state: State) -> None:
        super().__init__(flatten_state_dict=False)
        self._wanted = state

    def create_local_plan(self) -> LoadPlan:
        """What this rank has to read."""
        assert self.metadata is not None
        stored: Mapping[str, Any] = self.metadata.state_dict_metadata
        items: list[ReadItem] = []
        for key, value in self._wanted.items():
            if isinstance(value, Part):
                items += create_read_items_for_chunk_list(key, stored[key], value.chunks())
            else:
                items.append(_read_object(key))
        return LoadPlan(items)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take an object."""
        self._wanted[read_item.dest_index.fqn] = torch.load(value, weights_only=True)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The piece that an item of the plan fills."""
        part: Part = self._wanted[index.fqn]
        offset = tuple(index.offset or ())
        return next(piece for offsets, piece in part.boxes if offsets == offset)


def _write(key: str, value: Any) -> list[WriteItem]:
    if not isinstance(value, Part):
        return [WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO)]
    return [
        WriteItem(
            index=MetadataIndex(key, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=chunk,
                properties=TensorProperties.create_from_tensor(piece),
                size=torch.Size(value.size),
            ),
        )
        for chunk, (_, piece) in zip(value.chunks(), value.boxes)
    ]


def _read_object(key: str) -> ReadItem:
    return ReadItem(
        type=LoadItemType.BYTE_IO,
        dest_index=MetadataIndex(key),
        dest_offsets=torch.Size((0,)),
        storage_index=MetadataIndex(key),
        storage_offsets=torch.Size((0,)),
        lengths=torch.Size((0,)),
    )
