"""Storage of torch's distributed checkpoint (DCP): safetensors files and a JSON manifest.

DCP plans which rank reads which box; the classes here give it the boxes of shards, and read and
write files that hold no code.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from merak.checkpoint.files import record_file
from merak.checkpoint.manifest import StoredBox, StoredFile, StoredTensor
from merak.checkpoint.model_files import ModelFiles
from merak.checkpoint.remote.fetching import local_files
from merak.checkpoint.remote.folder import RemoteFolder
from merak.checkpoint.shards import Shards, TensorShard
from merak.checkpoint.values import dtype_name
from merak.checkpoint.writing import without_group_warning
from merak.core.errors import WeightsError
from merak.core.health.status import during, waiting_for_all

MAX_FILE_BYTES = 2**30
"""Size at which a rank begins a new file."""

BOXES = "boxes"
"""The shards of which a rank writes every box."""

WEIGHTS = "weights"
"""The shards that go into the files of the model, whole."""

Complete = Callable[[Mapping[str, StoredTensor], Mapping[str, StoredFile]], None]
"""Called on rank 0 with what all ranks have written."""


class CheckpointWriter(StorageWriter):
    """Writes a rank's boxes as safetensors files. It may run in a thread beside the training.

    Args:
        folder: where to write; seen by all ranks.
        rank: this rank.
        complete: called on rank 0 when all ranks have written.
        model_files: the files of the model that `from_pretrained` reads; None for none.
        group: in which ranks send what these files need; None for the default group.
        remote: where the files go, which are then removed here; None if they stay.

    Attributes:
        waits: whether this rank waits for others, and does not write itself.
        commits: whether it makes a checkpoint of what all ranks have written, while they wait.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        complete: Complete,
        model_files: ModelFiles | None = None,
        group: dist.ProcessGroup | None = None,
        remote: RemoteFolder | None = None,
    ) -> None:
        self._folder = folder
        self._remote = remote
        self._rank = rank
        self._complete = complete
        self._model_files = model_files
        self._group = group
        self.waits = False
        self.commits = False

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the boxes of a plan."""
        written: list[WriteResult] = []
        if self._model_files is not None:  # first: ranks that fail in it do so together
            assert isinstance(planner, ShardSavePlanner)
            weights = planner.weights()
            names = self._model_files.write(weights, self._folder, self._group, wait=self._wait)
            written += [self._stored(name) for name in names]
        for number, items in enumerate(_by_file(plan.items)):
            name = f"rank-{self._rank:05}" + (f"-part-{number}" if number else "")
            written += self._write_file(f"{name}.safetensors", items, planner)
        self.waits = True
        done: Future[list[WriteResult]] = Future()
        done.set_result(written)
        return done

    def _write_file(
        self, name: str, items: list[WriteItem], planner: SavePlanner
    ) -> list[WriteResult]:
        """Write one file; the last of its results is about the file itself."""
        boxes, state = [], {}
        for item in items:
            piece = planner.resolve_data(item)
            assert isinstance(piece, torch.Tensor)
            offset = tuple(item.index.offset or ())
            key = f"{item.index.fqn}{list(offset)}".replace(" ", "")
            state[key] = _apart(piece)
            stored = StoredBox(name, key, offset, tuple(piece.shape))
            boxes.append(WriteResult(item.index, piece.nbytes, stored))
        save_file(state, self._folder / name)
        return [*boxes, self._stored(name)]

    def _stored(self, name: str) -> WriteResult:
        """Record a file that has been written, and bring it to its place."""
        path = self._folder / name
        file = record_file(path)
        if self._remote is not None:
            self._remote.put(path, name)
            path.unlink()
        return WriteResult(MetadataIndex(name), file.num_bytes, file)

    @contextmanager
    def _wait(self, what: str, peers: tuple[int, ...]) -> Iterator[None]:
        self.waits = True
        try:
            yield
        finally:
            self.waits = False

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Hand what all ranks have written to `complete`, while the other ranks wait."""
        self.waits, self.commits = False, True
        files: dict[str, StoredFile] = {}
        boxes: dict[str, list[StoredBox]] = {}
        for result in (one for of_rank in results for one in of_rank):
            if isinstance(result.storage_data, StoredFile):
                files[result.index.fqn] = result.storage_data
            else:
                boxes.setdefault(result.index.fqn, []).append(result.storage_data)
        tensors = {}
        for key, of_tensor in boxes.items():
            known = metadata.state_dict_metadata[key]
            assert isinstance(known, TensorStorageMetadata)
            of_tensor.sort(key=lambda box: box.offset)
            dtype = dtype_name(known.properties.dtype)
            tensors[key] = StoredTensor(tuple(known.size), dtype, tuple(of_tensor))
        self._complete(tensors, files)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do: each save has a writer of its own."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the folder is there."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans as they are."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell DCP that a writer is never made from a name alone."""
        return False


class ReaderOfOneLoad(StorageReader):
    """Reader of tensors whose metadata is known; it serves one load.

    Args:
        metadata: of the tensors.
    """

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the tensors' metadata."""
        return self._metadata

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do: each load has a reader of its own."""

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to do: the metadata is known."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell DCP that a reader is never made from a name alone."""
        return False


class CheckpointReader(ReaderOfOneLoad):
    """Reads boxes, or parts of them, from safetensors files.

    Args:
        folder: of the checkpoint.
        metadata: of its tensors.
    """

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(metadata)
        self._folder = folder

    @during("reading parameters and optimizer")
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the boxes of a plan."""
        by_file: dict[str, list[tuple[ReadItem, StoredBox]]] = {}
        for item in plan.items:
            box: StoredBox = self._metadata.storage_data[item.storage_index]
            by_file.setdefault(box.file, []).append((item, box))
        place = local_files(self._folder)
        for name, items in by_file.items():
            with safe_open(place(name), framework="pt") as file:
                for item, box in items:
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(_read(file, item, box))
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


class ShardSavePlanner(DefaultSavePlanner):
    """Save planner for a state of two kinds: `BOXES`, which it plans, and `WEIGHTS`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return this rank's tensors for the model's files, by name."""
        held: Shards = self.state_dict[WEIGHTS]
        return {name: shard.boxes[0][1] for name, shard in held.items()}

    def create_local_plan(self) -> SavePlan:
        """Plan to write all boxes of this rank."""
        shards: Shards = self.state_dict[BOXES]
        self.plan = SavePlan([item for key in shards for item in _write_items(key, shards[key])])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        """Return the piece that an item of the plan writes."""
        return _piece(self.state_dict[BOXES][index.fqn], index)


class ShardLoadPlanner(DefaultLoadPlanner):
    """Load planner for the boxes of shards.

    Args:
        wanted: shards to fill.
    """

    def __init__(self, wanted: Shards) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._wanted = wanted

    def create_local_plan(self) -> LoadPlan:
        """Plan to read every element of this rank's boxes."""
        assert self.metadata is not None
        stored: Mapping[str, Any] = self.metadata.state_dict_metadata
        items: list[ReadItem] = []
        for key, shard in self._wanted.items():
            for chunk in shard.chunks():
                found = create_read_items_for_chunk_list(key, stored[key], [chunk])
                if sum(math.prod(item.lengths) for item in found) != math.prod(chunk.sizes):
                    raise WeightsError(f"the checkpoint does not hold all of {key}")
                items += found
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return the piece that an item of the plan fills."""
        return _piece(self._wanted[index.fqn], index)


def load_shards(reader: StorageReader, wanted: Shards) -> None:
    """Fill shards from a checkpoint. Collective."""
    with without_group_warning(), waiting_for_all("shards to be read by"):
        load({}, storage_reader=reader, planner=ShardLoadPlanner(wanted))


def _by_file(items: list[WriteItem]) -> Iterator[list[WriteItem]]:
    """Yield items in groups that fill a file each."""
    group: list[WriteItem] = []
    num_bytes = 0
    for item in items:
        size = item.tensor_storage_size() or 0
        if group and num_bytes + size > MAX_FILE_BYTES:
            yield group
            group, num_bytes = [], 0
        group.append(item)
        num_bytes += size
    if group:
        yield group


def _apart(piece: torch.Tensor) -> torch.Tensor:
    """The piece on the CPU, in memory that it shares with no other."""
    whole = piece.detach().cpu().contiguous()
    is_own = whole.untyped_storage().nbytes() == whole.nbytes
    return whole if is_own else whole.clone()


def _read(file: Any, item: ReadItem, box: StoredBox) -> torch.Tensor:
    whole = file.get_slice(box.key)
    if tuple(whole.get_shape()) != box.shape:
        raise WeightsError(f"{box.key} in {box.file} has another shape than its manifest says")
    if not box.shape:
        return file.get_tensor(box.key)  # type: ignore[no-any-return]
    places = zip(item.storage_offsets, item.lengths, strict=True)
    return whole[tuple(slice(start, start + length) for start, length in places)]  # type: ignore[no-any-return]


def _piece(shard: TensorShard, index: MetadataIndex) -> torch.Tensor:
    offset = tuple(index.offset or ())
    return next(piece for offsets, piece in shard.boxes if offsets == offset)


def _write_items(key: str, shard: TensorShard) -> list[WriteItem]:
    return [
        WriteItem(
            index=MetadataIndex(key, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=chunk,
                properties=TensorProperties(dtype=piece.dtype),
                size=torch.Size(shard.size),
            ),
        )
        for chunk, (_, piece) in zip(shard.chunks(), shard.boxes)
    ]
