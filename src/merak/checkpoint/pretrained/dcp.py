"""Folders of torch's distributed checkpoint (DCP), by the names of the model's own state dict.

`torch.distributed.checkpoint.load(model.state_dict(), checkpoint_id=folder)` reads them, on any
number of ranks. Their index is a pickle; Merak reads of it what such an index is made of.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import PreTrainedModel

from merak.checkpoint.files import damage
from merak.checkpoint.manifest import MANIFEST, MODEL, TIED, read_manifest
from merak.checkpoint.pretrained.averages import StoredAverages
from merak.checkpoint.pretrained.export import Exported, check_target
from merak.checkpoint.pretrained.placing import written_folder
from merak.checkpoint.pretrained.whole_tensors import WholeTensors
from merak.checkpoint.values import unpack_value
from merak.checkpoint.writing import without_group_warning
from merak.core.errors import WeightsError

INDEX = ".metadata"

_OTHERS: Mapping[tuple[str, str], Any] = {
    ("builtins", "list"): list,
    ("builtins", "dict"): dict,
    ("builtins", "tuple"): tuple,
    ("builtins", "set"): set,
    ("collections", "OrderedDict"): OrderedDict,
    ("pathlib", "PosixPath"): PurePosixPath,  # names of folders, which are not opened
    ("pathlib", "WindowsPath"): PureWindowsPath,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
}
"""Objects of an index that are not classes of DCP's own, nor types of elements."""


def is_dcp(folder: Path) -> bool:
    """Whether a folder is one of torch's distributed checkpoint."""
    return (folder / INDEX).is_file() and not (folder / MANIFEST).exists()


class _Saving(DefaultSavePlanner):
    """Save planner that reads each tensor when it is written."""

    def __init__(self, read: Callable[[str], torch.Tensor]) -> None:
        super().__init__()
        self._read = read

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        """Read a tensor."""
        return self._read(index.fqn)


def export_dcp(
    checkpoint: Path,
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    average: bool = False,
) -> Exported:
    """Export the model of a checkpoint as a folder of torch's distributed checkpoint.

    Args:
        checkpoint: its folder, of any layout.
        target: the folder to write.
        dtype: type of floating point tensors; None for their own.
        overwrite: as of `export_checkpoint`.
        average: export the moving averages of its parameters in their place.

    Returns:
        What was written.

    Raises:
        WeightsError: as of `export_checkpoint`.
        SavingError: the target cannot be written.
    """
    check_target(checkpoint, target, overwrite)
    manifest = read_manifest(checkpoint)
    stored = {n.removeprefix(MODEL): t for n, t in manifest.tensors.items() if n.startswith(MODEL)}
    files = sorted({box.file for tensor in stored.values() for box in tensor.boxes})
    if not stored:
        raise WeightsError(f"{checkpoint} holds no model; export another checkpoint.")
    if (problem := damage(checkpoint, manifest.files, files)) is not None:
        raise WeightsError(f"{checkpoint} is damaged ({problem}); export another checkpoint.")
    tensors = WholeTensors(checkpoint, MODEL)()
    tied = unpack_value(manifest.values[TIED]) if TIED in manifest.values else {}
    firsts = {**{name: name for name in tensors}, **tied}

    averages = StoredAverages(checkpoint) if average else None

    def read(name: str) -> torch.Tensor:
        found = tensors[first := firsts[name]]
        if averages is not None and first in averages.names:
            found = averages.read(first).to(dtype or found.dtype)
        is_float = found.is_floating_point() and found.element_size() > 1
        return found.to(dtype) if dtype is not None and is_float else found

    shown = {name: read(name).to("meta") for name in firsts}
    with written_folder(target) as unfinished, without_group_warning():
        writer = filesystem.FileSystemWriter(unfinished)
        save(shown, storage_writer=writer, planner=_Saving(read), no_dist=True)
        return Exported.of(unfinished, sum(tensor.numel() for tensor in tensors.values()))


def export_from_dcp(
    folder: Path,
    target: Path,
    model: PreTrainedModel,
    *,
    max_shard_size: int | None = None,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> Exported:
    """Export a folder of torch's distributed checkpoint as one that `from_pretrained` reads.

    Args:
        folder: of torch's distributed checkpoint.
        target: the folder to write.
        model: whose weights it has, whole, in memory; it gets them.
        max_shard_size: the most bytes of a file; None as transformers has it.
        dtype: type of floating point weights; None for the model's own.
        overwrite: as of `export_checkpoint`.

    Returns:
        What was written.

    Raises:
        WeightsError: as of `load_dcp`, and as of `export_checkpoint`.
        SavingError: the target cannot be written.
    """
    check_target(folder, target, overwrite)
    load_dcp(model, folder)
    with written_folder(target) as unfinished:
        size: dict[str, Any] = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
        if dtype is not None:
            nn.Module.to(model, dtype)
        model.save_pretrained(unfinished, **size)
        return Exported.of(unfinished, model.num_parameters())


def load_dcp(model: nn.Module, folder: Path) -> None:
    """Load the weights of a model from a folder of torch's distributed checkpoint.

    Args:
        model: whole, in memory.
        folder: of the model's state dict, or of a dict that has it in one of its entries.

    Raises:
        WeightsError: it is damaged, or of another model.
    """
    reader = _Reader(folder)
    try:
        entries = reader.read_metadata().state_dict_metadata
    except (OSError, EOFError, AttributeError, pickle.UnpicklingError) as cause:
        raise WeightsError(f"{folder}/{INDEX} cannot be read: {cause}.") from cause
    state = model.state_dict()
    prefix = _prefix(set(entries), list(state), folder)
    for name, tensor in state.items():
        entry = entries[prefix + name]
        size = tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
        if size != tuple(tensor.shape):
            raise WeightsError(
                f"{name} is of shape {size} in {folder} and {tuple(tensor.shape)} in the model; "
                "name the model that was saved there."
            )
    with without_group_warning():
        wanted = {prefix + name: tensor for name, tensor in state.items()}
        load(wanted, storage_reader=reader, planner=DefaultLoadPlanner(), no_dist=True)


def _prefix(stored: set[str], names: list[str], folder: Path) -> str:
    """What is before the model's names in the folder, such as "model."."""
    first = names[0]
    found = sorted({key.removesuffix(first) for key in stored if key.endswith(first)}, key=len)
    for prefix in found:
        if all(prefix + name in stored for name in names):
            return prefix
    missing = next((name for name in names if (found or [""])[0] + name not in stored), first)
    raise WeightsError(
        f"{folder} has no {missing}, which the model has; name the model that was saved there."
    )


class _Reader(filesystem.FileSystemReader):
    """Reader that takes of an index what torch has written there, and no other object."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the index."""
        with open(Path(self.path) / INDEX, "rb") as file:
            found = _Unpickler(file).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError("it holds no index")
        return found


class _Unpickler(pickle.Unpickler):
    """Unpickler of indexes alone, which calls nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        """Look up a class of an index.

        Raises:
            pickle.UnpicklingError: an index has no such objects.
        """
        own = {metadata.__name__: metadata, filesystem.__name__: filesystem}.get(module)
        found = _OTHERS.get((module, name), getattr(own, name, None))
        if own is not None and getattr(found, "__module__", None) != module:
            found = None  # what these modules have imported
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        if found is None or (own is not None and not isinstance(found, type)):
            raise pickle.UnpicklingError(f"{module}.{name} is no part of an index")
        return found
