"""Safetensors files that are written tensor by tensor, in any order, and checked afterwards.

The bytes are those of `safetensors.torch.save_file`, which needs all tensors of a file at once.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from merak.core.errors import WeightsError
from merak.core.files.json_file import parse_json
from merak.core.storages import memory_of
from merak.core.tensor_meta import TensorMeta

DTYPES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Element types by the names of safetensors, in the order in which a file has its tensors."""

_HEADER_UNIT = 8
_LONGEST_HEADER = 100_000_000
"""The most bytes of a header, as safetensors reads it."""


class DamagedFile(OSError):
    """Error about a file that is not what was written, or not what its header says."""


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Layout of a safetensors file: its header, and the place of every tensor.

    Args:
        header: the length of the header in JSON and the header itself, as bytes.
        begins: first byte of every tensor in the file, by key.
        num_bytes: size of the whole file.
    """

    header: bytes
    begins: Mapping[str, int]
    num_bytes: int


def lay_out(tensors: Mapping[str, TensorMeta]) -> FileLayout:
    """Lay a file out as safetensors does, with the metadata that transformers gives it.

    Args:
        tensors: shape and type of every tensor by key.

    Raises:
        WeightsError: a type that safetensors does not know.
    """
    for key, meta in tensors.items():
        if meta.dtype not in DTYPES:
            raise WeightsError(
                f"{key} is {meta.dtype}, which safetensors cannot hold; use another dtype, or "
                "leave it out of the state dict."
            )
    order = list(DTYPES)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins, end = {}, 0
    for key in sorted(tensors, key=lambda key: (order.index(tensors[key].dtype), key)):
        meta = tensors[key]
        begins[key], end = end, end + meta.num_bytes
        header[key] = {
            "dtype": DTYPES[meta.dtype],
            "shape": list(meta.shape),
            "data_offsets": [begins[key], end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _HEADER_UNIT)
    whole = len(text).to_bytes(8, "little") + text
    return FileLayout(whole, {k: len(whole) + b for k, b in begins.items()}, len(whole) + end)


class TensorFile:
    """A safetensors file while it is written, which ends with `close` or `abandon`.

    Args:
        path: of the file, which must not be there yet.
        layout: of its tensors.
    """

    def __init__(self, path: Path, layout: FileLayout) -> None:
        self._layout = layout
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115, open until `close`
        self._write(0, memoryview(layout.header))

    def write(self, key: str, tensor: torch.Tensor) -> None:
        """Write a tensor to its place.

        Args:
            key: of the tensor in the file.
            tensor: of the shape and type that were planned, on any device.
        """
        flat = tensor.detach().cpu().contiguous()
        self._write(self._layout.begins[key], memory_of(flat))

    def close(self) -> None:
        """Sync the file to disk and close it."""
        try:
            os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def abandon(self) -> None:
        """Close the file as it is; a failure has come before its end."""
        self._file.close()

    def _write(self, begin: int, data: memoryview) -> None:
        self._file.seek(begin)
        while data:  # the system writes at most 2 GiB at a time
            data = data[self._file.write(data) :]


def check_file(path: Path, layout: FileLayout) -> None:
    """Compare the size and the header of a file with its plan.

    Args:
        path: of the file.
        layout: as it was planned.

    Raises:
        DamagedFile: they differ.
    """
    size = path.stat().st_size
    if size != layout.num_bytes:
        raise DamagedFile(f"{path.name} has {size:,} bytes of {layout.num_bytes:,}")
    with open(path, "rb") as file:
        if file.read(len(layout.header)) != layout.header:
            raise DamagedFile(f"{path.name} has another header than was written")


def read_layout(path: Path) -> tuple[dict[str, TensorMeta], dict[str, int]]:
    """Read the header of a safetensors file, and check it against the file's size.

    Args:
        path: of the file.

    Returns:
        Shape and type of every tensor, and its first byte in the file, by key and in their order.

    Raises:
        DamagedFile: it is cut off, or is no safetensors file.
    """
    types = {name: dtype for dtype, name in DTYPES.items()}
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
            raise DamagedFile(f"{path.name} is no whole safetensors file")
        text = file.read(length)
    metas: dict[str, TensorMeta] = {}
    begins: dict[str, int] = {}
    end = 0
    try:
        header = parse_json(text.decode())
        header.pop("__metadata__", None)
        for key, entry in sorted(header.items(), key=lambda pair: pair[1]["data_offsets"]):
            meta = TensorMeta(tuple(int(n) for n in entry["shape"]), types[entry["dtype"]])
            begin, stop = entry["data_offsets"]
            if begin != end or stop - begin != meta.num_bytes or min(meta.shape, default=0) < 0:
                raise ValueError(f"{key} is not where it should be")
            metas[key], begins[key], end = meta, 8 + length + begin, stop
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as cause:
        raise DamagedFile(f"{path.name} has a header that cannot be read ({cause})") from cause
    if size != 8 + length + end:
        raise DamagedFile(f"{path.name} has {size:,} bytes of {8 + length + end:,}")
    return metas, begins


def read_tensor(path: Path, begin: int, meta: TensorMeta) -> torch.Tensor:
    """Read one tensor of a file into memory of its own.

    Args:
        path: of the file.
        begin: its first byte.
        meta: its shape and type.

    Raises:
        DamagedFile: the file ends before it does.
    """
    whole = torch.empty(math.prod(meta.shape) * meta.dtype.itemsize, dtype=torch.uint8)
    left = whole.numpy().data
    with open(path, "rb", buffering=0) as file:
        file.seek(begin)
        while left:
            num_bytes = file.readinto(left)
            if not num_bytes:
                raise DamagedFile(f"{path.name} ends before its tensors do")
            left = left[num_bytes:]
    return whole.view(meta.dtype).view(meta.shape)
