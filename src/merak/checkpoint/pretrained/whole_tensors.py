"""Whole tensors of a checkpoint, read by one process without the others.

A tensor that lies in a file as it is becomes a view of the file, mapped into memory: several ranks
of a host that read a checkpoint take no more memory than one, until they write into a tensor, which
then has pages of its own. The file on disk is never written.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from merak.checkpoint.manifest import StoredBox, StoredTensor, read_manifest
from merak.checkpoint.pretrained.tensor_file import read_layout
from merak.checkpoint.values import dtype_of
from merak.core.errors import WeightsError
from merak.core.tensor_meta import TensorMeta


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
            self._files = {name: _MappedFile(folder / name) for name in sorted(names)}
        except OSError as error:
            raise WeightsError(f"{folder} is damaged ({error}).") from error

    def __call__(self) -> dict[str, torch.Tensor]:
        """Read every tensor by its name."""
        return {name: _read(tensor, self._files) for name, tensor in self._stored.items()}


class _MappedFile:
    """A safetensors file in memory, whose pages are copied where they are written."""

    def __init__(self, path: Path) -> None:
        self._metas, self._begins = read_layout(path)
        with open(path, "rb") as file:
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def tensor(self, key: str) -> torch.Tensor:
        """One of its tensors, a view."""
        meta: TensorMeta = self._metas[key]
        if not meta.num_bytes:
            return torch.empty(meta.shape, dtype=meta.dtype)
        flat = np.frombuffer(self._memory, np.uint8, meta.num_bytes, self._begins[key])
        if self._begins[key] % meta.dtype.itemsize:
            flat = flat.copy()
        return torch.from_numpy(flat).view(meta.dtype).view(meta.shape)


def _read(tensor: StoredTensor, files: Mapping[str, _MappedFile]) -> torch.Tensor:
    first: StoredBox = tensor.boxes[0]
    if first.shape == tensor.shape:
        return files[first.file].tensor(first.key)
    whole = torch.empty(tensor.shape, dtype=dtype_of(tensor.dtype))
    for box in tensor.boxes:
        place = tuple(slice(at, at + size) for at, size in zip(box.offset, box.shape, strict=True))
        whole[place] = files[box.file].tensor(box.key)
    return whole
