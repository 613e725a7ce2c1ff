"""Checkpoints in the format before the manifest, whose index is a pickle; read if that is allowed.

Their parameters and optimizer lie in a folder of their own, in the files of torch's own writer.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from merak.checkpoint.optimizer_state import split_key
from merak.checkpoint.storage import ShardLoadPlanner
from merak.checkpoint.writing import without_group_warning
from merak.core.errors import WeightsError

FOLDER = "merak"
GROUPS = "optimizer_groups"
FILES = {"scheduler": "scheduler.pt", "loss_scale": "scaler.pt"}
"""Small values by the file that holds each."""


def is_pickled(folder: Path) -> bool:
    """Whether a folder holds a checkpoint of this format, or a part of one."""
    return (folder / FOLDER).is_dir()


def open_pickled(folder: Path) -> tuple[Metadata, dict[str, Any], FileSystemReader]:
    """Open a checkpoint of this format: its tensors' metadata, small values and reader.

    Raises:
        WeightsError: it is not whole.
    """
    index = folder / FOLDER / ".metadata"
    if not index.is_file() or not index.stat().st_size:
        raise WeightsError(
            f"{folder} is not a whole checkpoint ({FOLDER}/.metadata, which is written last, is "
            "missing); resume from another one."
        )
    try:
        reader = FileSystemReader(folder / FOLDER)
        metadata = reader.read_metadata()
        found = _read_objects(FileSystemReader(folder / FOLDER), metadata)
        values: dict[str, Any] = {GROUPS: found.pop(GROUPS, None), "optimizer_values": {}}
        for key, value in found.items():
            name, state_key = split_key(key)
            values["optimizer_values"].setdefault(name, {})[state_key] = value
        for name, file in FILES.items():
            if (folder / file).is_file():
                values[name] = torch.load(folder / file, weights_only=True)
    except Exception as cause:  # whatever a damaged file may lead to
        message = " ".join(str(cause).split())[:120] or type(cause).__name__
        raise WeightsError(
            f"{folder} is damaged ({message}); resume from another checkpoint."
        ) from cause
    return metadata, values, reader


def _read_objects(reader: FileSystemReader, metadata: Metadata) -> dict[str, Any]:
    entries = metadata.state_dict_metadata.items()
    keys = [key for key, entry in entries if not isinstance(entry, TensorStorageMetadata)]
    planner = _ObjectPlanner(keys)
    with without_group_warning():
        load({}, storage_reader=reader, planner=planner, no_dist=True)
    return planner.found


class _ObjectPlanner(ShardLoadPlanner):
    """Load planner for all that is no tensor, on each rank by itself."""

    def __init__(self, keys: list[str]) -> None:
        super().__init__({})
        self._keys = keys
        self.found: dict[str, Any] = {}

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([_item(key) for key in self._keys])

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.found[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def _item(key: str) -> ReadItem:
    nowhere = torch.Size((0,))
    index = MetadataIndex(key)
    return ReadItem(LoadItemType.BYTE_IO, index, nowhere, index, nowhere, nowhere)
