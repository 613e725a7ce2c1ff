"""A saved checkpoint, opened: its tensors' metadata, small values and reader, in every format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import StorageReader

from merak.checkpoint.files import damage
from merak.checkpoint.formats.of_trainer import (
    TrainerFiles,
    TrainerReader,
    is_of_trainer,
    open_of_trainer,
)
from merak.checkpoint.formats.pickled import is_pickled, open_pickled
from merak.checkpoint.manifest import MANIFEST, read_manifest
from merak.checkpoint.remote.fetching import is_fetched
from merak.checkpoint.storage import CheckpointReader
from merak.checkpoint.values import unpack_value
from merak.core.errors import WeightsError
from merak.graph.weights.rank_agreement import gather_objects, is_distributed


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """Checkpoint on disk.

    Args:
        folder: of it.
        metadata: of its tensors.
        values: small values by name.
        model: description of the model; None where it was not saved.
        reader: of its tensors.
        of_trainer: its files where transformers' own Trainer wrote them, whose tensors get their
            keys when they are loaded; None for one of Merak.
    """

    folder: Path
    metadata: Metadata
    values: Mapping[str, Any]
    model: Mapping[str, Any] | None
    reader: StorageReader
    of_trainer: TrainerFiles | None = None

    def shape(self, key: str) -> tuple[int, ...] | None:
        """Return the whole shape of a tensor; None where there is none of that key."""
        entry = self.metadata.state_dict_metadata.get(key)
        return tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None


def open_checkpoint(folder: Path, allow_pickled: bool = False) -> SavedCheckpoint:
    """Open a checkpoint.

    Args:
        folder: of the checkpoint.
        allow_pickled: whether to open one in the format before this one, whose index is a pickle:
            reading it can run code that is in it.

    Raises:
        WeightsError: there is no checkpoint, it is damaged or of a newer version, or it is in the
            format before this one and that is not allowed.
    """
    if is_pickled(folder) and not (folder / MANIFEST).exists():
        if not allow_pickled:
            raise WeightsError(
                f"{folder} was written by an earlier Merak, with a pickled index that can run code "
                "when it is read; if you trust who wrote it, set allow_pickled_checkpoint=True."
            )
        metadata, values, reader = open_pickled(folder)
        return SavedCheckpoint(folder, metadata, values, None, reader)
    if is_of_trainer(folder):
        found, none = open_of_trainer(folder), TrainerReader({})
        return SavedCheckpoint(folder, none.read_metadata(), found.values, None, none, found)
    manifest = read_manifest(folder)
    try:
        values = {name: unpack_value(value) for name, value in manifest.values.items()}
        if "optimizer_groups" in values:
            shared = values["optimizer_groups"]
            values["optimizer_groups"] = {name: group for names, group in shared for name in names}
    except (ValueError, TypeError, KeyError, RuntimeError) as cause:
        raise WeightsError(f"{folder}/{MANIFEST} holds a value that is none: {cause}.") from cause
    files = CheckpointReader(folder, manifest.metadata)
    return SavedCheckpoint(folder, manifest.metadata, values, manifest.model, files)


def check_valid(folder: Path, allow_pickled: bool = False) -> None:
    """Check that a checkpoint is as it was written: every file, every byte. Collective.

    Args:
        folder: of the checkpoint.
        allow_pickled: as of `open_checkpoint`; such a checkpoint has no checksums.

    Raises:
        WeightsError: it is not; the same on all ranks.
    """
    problem: str | None = None
    try:
        open_checkpoint(folder, allow_pickled)
    except WeightsError as error:
        problem = str(error)
    problems = gather_objects(problem)
    # The sizes of a fetched folder's files are compared already, and checksums when they come.
    if not any(problems) and (folder / MANIFEST).exists() and not is_fetched(folder):
        files = read_manifest(folder).files
        ordered = sorted(files, key=lambda name: files[name].num_bytes)
        rank = dist.get_rank() if is_distributed() else 0
        found = damage(folder, files, ordered[rank :: len(problems)])  # each rank reads a part
        sentence = f"{folder} is damaged ({found}); resume from another checkpoint."
        problems = gather_objects(sentence if found is not None else None)
    for one in problems:
        if one is not None:
            raise WeightsError(one)
