"""Manifest of a checkpoint: what is in which file, with checksums; JSON, and written last.

A folder is a checkpoint when it has a manifest, and it is valid when the manifest's own checksum
and those of all files are right.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from merak.checkpoint.values import dtype_of
from merak.core.errors import WeightsError
from merak.core.files.json_file import UnreadableFile, parse_json, read_text

MANIFEST = "manifest.json"
MODEL = "model/"
"""Keys of parameters and buffers are `model/name`."""

TIED = "tied_names"
"""Small value: first names of tensors that the state dict has several times, by the other ones."""

FORMAT = "merak checkpoint"
MOST_BYTES = 2**33
"""Size of the largest manifest: it has a few hundred bytes for each box of thousands of ranks."""

VERSION = 1
"""Version of the format; a reader refuses newer ones."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """File of a checkpoint.

    Args:
        num_bytes: its size.
        checksum: xxh3_128 of its bytes, in hexadecimal.
    """

    num_bytes: int
    checksum: str


@dataclass(frozen=True, slots=True)
class StoredBox:
    """Box of a tensor, as it lies in a file.

    Args:
        file: name of a safetensors file.
        key: name of the box in that file.
        offset: of the box in the whole tensor.
        shape: sizes of the box.
    """

    file: str
    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Tensor of a checkpoint.

    Args:
        shape: of the whole.
        dtype: as torch's name without its prefix.
        boxes: that make it up.
    """

    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[StoredBox, ...]


@dataclass(frozen=True)
class Manifest:
    """All that a checkpoint holds.

    Args:
        tensors: by key, such as "model/" and the parameter's name.
        values: packed small values by name; see `merak.checkpoint.values`.
        files: by name, without the manifest itself.
        model: description of the model; see `merak.checkpoint.description`.
        layout: degrees of the job that saved it, for people.
        versions: of the packages that wrote it.
    """

    tensors: Mapping[str, StoredTensor]
    values: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, StoredFile] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    layout: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def metadata(self) -> Metadata:
        """The tensors as torch's distributed checkpoint knows them."""
        return Metadata(
            state_dict_metadata={
                key: TensorStorageMetadata(
                    TensorProperties(dtype=dtype_of(tensor.dtype)),
                    torch.Size(tensor.shape),
                    [ChunkStorageMetadata(torch.Size(b.offset), torch.Size(b.shape))
                     for b in tensor.boxes],
                )
                for key, tensor in self.tensors.items()
            },
            storage_data={
                MetadataIndex(key, box.offset): box
                for key, tensor in self.tensors.items()
                for box in tensor.boxes
            },
        )  # fmt: skip

    def text(self) -> str:
        """Format the manifest as the text of its file."""
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return _dump({**content, "checksum": _checksum(content)})


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint's folder.

    Raises:
        WeightsError: there is none, it is damaged, or of a newer version.
    """
    try:
        text = read_text(folder / MANIFEST, MOST_BYTES)
    except UnreadableFile as cause:
        if isinstance(cause.__cause__, FileNotFoundError):
            raise without_manifest(folder) from cause
        raise _no_checkpoint(folder, f"{MANIFEST} {cause}") from cause
    return parse_manifest(folder, text)


def without_manifest(place: object) -> WeightsError:
    """The error of a place where there is no manifest.

    Args:
        place: folder or URL, for the message.
    """
    return _no_checkpoint(place, f"{MANIFEST}, which is written last, is missing")


def parse_manifest(place: object, text: str) -> Manifest:
    """Read the text of a manifest.

    Args:
        place: folder or URL of the checkpoint, for messages.
        text: of the file.

    Raises:
        WeightsError: it is damaged, or of a newer version.
    """
    try:
        content = parse_json(text)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError("it is no manifest")
        _refuse_newer(place, content)
        found = content.pop("checksum", None)
        if found != _checksum(content) or text != _dump({**content, "checksum": found}):
            raise ValueError("its checksum is wrong")
        return _parsed(content)
    except UnreadableFile as cause:
        raise _no_checkpoint(place, f"{MANIFEST} {cause}") from cause
    except WeightsError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as cause:
        raise _no_checkpoint(place, f"{MANIFEST} is damaged: {cause}") from cause


def _refuse_newer(place: object, content: Mapping[str, Any]) -> None:
    version = content.get("version")
    if isinstance(version, int) and version > VERSION:
        by = dict(content.get("versions") or {}).get("merak", "a newer one")
        raise WeightsError(
            f"{place} has version {version} of the checkpoint format (Merak {by}), and this Merak "
            f"reads versions up to {VERSION}; update Merak."
        )


def _no_checkpoint(place: object, why: str) -> WeightsError:
    return WeightsError(f"{place} holds no valid checkpoint ({why}); resume from another one.")


def _parsed(content: Mapping[str, Any]) -> Manifest:
    files = {_inner(name): StoredFile(**one) for name, one in content["files"].items()}
    tensors = {}
    for key, one in content["tensors"].items():
        boxes = tuple(
            StoredBox(_inner(b["file"]), b["key"], tuple(b["offset"]), tuple(b["shape"]))
            for b in one["boxes"]
        )
        dtype_of(one["dtype"])
        tensors[key] = StoredTensor(tuple(one["shape"]), one["dtype"], boxes)
    unlisted = {box.file for one in tensors.values() for box in one.boxes} - files.keys()
    if unlisted:
        raise ValueError(f"{min(unlisted)} is not among its files")
    rest = {name: content[name] for name in ("values", "model", "layout", "versions")}
    return Manifest(tensors=tensors, files=files, **rest)


def _inner(name: str) -> str:
    """A name of a file of the folder itself, which leads to no other place."""
    parts = name.split("/")
    if "\\" in name or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"{name!r} is no name of a file in the folder")
    return name


def _dump(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n"


def _checksum(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(_dump(content).encode())
