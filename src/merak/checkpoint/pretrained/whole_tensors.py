"""Whole tensors of a checkpoint, read by one process without the others.

Where the host has room, tensors are in memory, so that whoever writes over a file, by
`safetensors.torch.save_file` or `torch.save`, does it no harm. Those of a large model are views of
the files, mapped into memory: several ranks of a host that read a checkpoint take no more memory
than one, until they write into a tensor, which then has pages of its own. The file on disk is never
written.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from merak.checkpoint.manifest import StoredBox, StoredTensor, read_manifest
from merak.checkpoint.pretrained.tensor_file import read_layout
from merak.checkpoint.remote.fetching import local_files
from merak.checkpoint.values import dtype_of
from merak.core.doctor.finding import System
from merak.core.doctor.memory import read_memory
from merak.core.errors import WeightsError
from merak.core.tensor_meta import TensorMeta

_SHARE = 0.25
"""Of the memory that is free, the most that tensors may take which need not be mapped."""


class WholeTensors:
    """Reads the tensors of a checkpoint as it is now, also once its folder has been removed.

    Args:
        folder: of the checkpoint.
        prefix: of the tensors' keys, which is left out.

    Raises:
        WeightsError: it is no checkpoint, or a file is not what was written.
    """

    def __init__(self, folder: Path, prefix: str) -> None:
        tensors = read_manifest(folder).tensors
        self._stored = {
            key.removeprefix(prefix): one for key, one in tensors.items() if key.startswith(prefix)
        }
        names = {box.file for one in self._stored.values() for box in one.boxes}
        try:
            place = local_files(folder)
            sizes = {name: place(name).stat().st_size for name in sorted(names)}
            is_mapped = not _fits(sum(sizes.values()))
            self._files = {name: _File(folder / name, is_mapped) for name in sizes}
        except OSError as error:
            raise WeightsError(f"{folder} is damaged ({error}).") from error

    def __call__(self) -> dict[str, torch.Tensor]:
        """Read every tensor by its name."""
        return {name: _read(tensor, self._files) for name, tensor in self._stored.items()}


def _fits(num_bytes: int) -> bool:
    """Whether all ranks of this host have room for so many bytes each, and much to spare."""
    memory = read_memory(System())
    return memory.num_local_ranks * num_bytes <= _SHARE * memory.free_bytes


class _File:
    """A safetensors file in memory, or mapped; pages of this are copied where they are written."""

    def __init__(self, path: Path, is_mapped: bool) -> None:
        self._metas, self._begins = read_layout(path)
        with open(path, "rb") as file:
            if is_mapped:
                self._memory: Any = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            else:
                self._memory = bytearray(os.fstat(file.fileno()).st_size)
                file.readinto(self._memory)

    def tensor(self, key: str) -> torch.Tensor:
        """One of its tensors, a view."""
        meta: TensorMeta = self._metas[key]
        if not meta.num_bytes:
            return torch.empty(meta.shape, dtype=meta.dtype)
        flat = np.frombuffer(self._memory, np.uint8, meta.num_bytes, self._begins[key])
        if self._begins[key] % meta.dtype.itemsize:
            flat = flat.copy()
        return torch.from_numpy(flat).view(meta.dtype).view(meta.shape)


def _read(tensor: StoredTensor, files: Mapping[str, _File]) -> torch.Tensor:
    first: StoredBox = tensor.boxes[0]
    if first.shape == tensor.shape:
        return files[first.file].tensor(first.key)
    whole = torch.empty(tensor.shape, dtype=dtype_of(tensor.dtype))
    for box in tensor.boxes:
        place = tuple(slice(at, at + size) for at, size in zip(box.offset, box.shape, strict=True))
        whole[place] = files[box.file].tensor(box.key)
    return whole
