"""Sharded tensors in torch's distributed checkpoint (DCP), saved and loaded in any layout.

A rank's shard of a fused parameter is several boxes of the whole, which no DTensor placement
describes; the planners below give DCP the boxes themselves, and it finds the saved boxes that
cover them.
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
    """Some rows of a rank's tensor as a shard of the whole; its pieces are views.

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


State = dict[str, Any]
"""`TensorShard` by key; any other object is pickled."""


def save_shards(folder: Path, state: State) -> None:
    """Write the shards of all ranks; equal boxes are written once. Collective."""
    with _allow_single_process(), waiting_for_all("shards to be written by"):
        save(dict(state), storage_writer=_Writer(folder), planner=_SavePlanner())


def load_shards(folder: Path, state: State) -> None:
    """Read into the pieces of the shards of `state`, and replace its other objects. Collective."""
    planner = _LoadPlanner(state)
    with _allow_single_process(), waiting_for_all("shards to be read by"):
        load({}, storage_reader=_Reader(folder), planner=planner)


def read_index(folder: Path) -> Metadata | None:
    """The index of a checkpoint; None where the folder holds no complete one."""
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
def _allow_single_process() -> Iterator[None]:
    """Silence torch's warning about a checkpoint without a process group."""
    with warnings.catch_warnings():
        if not is_distributed():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


class _Writer(FileSystemWriter):
    """Writer that sets the rank's status; during the rest of a save ranks wait for one another."""

    @during("writing parameters and optimizer")
    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        return super().write_data(*args, **kwargs)

    @during("writing the index of parameters and optimizer")
    def finish(self, *args: Any, **kwargs: Any) -> None:
        super().finish(*args, **kwargs)


class _Reader(FileSystemReader):
    """Reader that sets the rank's status; during the rest of a load ranks wait for one another."""

    @during("reading parameters and optimizer")
    def read_data(self, *args: Any, **kwargs: Any) -> Any:
        return super().read_data(*args, **kwargs)

    @during("reading the index of parameters and optimizer")
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return super().read_metadata(*args, **kwargs)


class _SavePlanner(DefaultSavePlanner):
    """Save planner for the boxes of shards."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def create_local_plan(self) -> SavePlan:
        """Items that this rank writes."""
        items = [item for key, value in self.state_dict.items() for item in _write(key, value)]
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The piece that an item of the plan writes."""
        value = self.state_dict[index.fqn]
        if not isinstance(value, TensorShard):
            return value
        return next(piece for offsets, piece in value.boxes if offsets == tuple(index.offset or ()))


class _LoadPlanner(DefaultLoadPlanner):
    """Load planner for the boxes of shards."""

    def __init__(self, state: State) -> None:
        super().__init__(flatten_state_dict=False)
        self._wanted = state

    def create_local_plan(self) -> LoadPlan:
        """Items that this rank reads."""
        assert self.metadata is not None
        stored: Mapping[str, Any] = self.metadata.state_dict_metadata
        items: list[ReadItem] = []
        for key, value in self._wanted.items():
            if isinstance(value, TensorShard):
                items += create_read_items_for_chunk_list(key, stored[key], value.chunks())
            else:
                items.append(_read_object(key))
        return LoadPlan(items)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Replace an object of the state by the loaded one."""
        self._wanted[read_item.dest_index.fqn] = torch.load(value, weights_only=True)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The piece that an item of the plan fills."""
        shard: TensorShard = self._wanted[index.fqn]
        offset = tuple(index.offset or ())
        return next(piece for offsets, piece in shard.boxes if offsets == offset)


def _write(key: str, value: Any) -> list[WriteItem]:
    if not isinstance(value, TensorShard):
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
